"""The text tower: a causal transformer over byte pairs, in CLIP's shape (arXiv:2103.00020, section 2.4).

CLIP pools a text at its end token, and under causal attention later tokens have no effect on it. The padding after it
is therefore skipped: the tokens of all texts are concatenated. Only attention, a small part of the work, pads the texts
to one length.

Shape suffixes: B batch, L length of the longest text, T tokens of all texts, W width, H heads, K width of a head,
D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.tokenizer import Tokenizer
from clipx.model.tower_spec import Gelu, Pool, TextTowerSpec


def end_positions(tokens_BL: Tensor) -> Tensor:
    """Returns the position of each text's first end token, [B]."""
    return (tokens_BL == Tokenizer.end_id).int().argmax(dim=1)  # argmax returns the first of equal values


@dataclass(frozen=True, slots=True)
class Packing:
    """B texts packed as T tokens, with their positions in [B, L]."""

    tokens_T: Tensor
    position_T: Tensor  # position in the token's text
    flat_index_T: Tensor  # index among all B * L positions
    end_B: Tensor  # index in T of the token that each text is pooled at: its end token, or another
    shape: tuple[int, int]  # (B, L)
    mask_B1LL: Tensor | None = None  # True where a position (row) attends to another; None: to itself and earlier ones

    @classmethod
    def of(cls, tokens_BL: Tensor, packed: bool, pool: Pool = Pool.end) -> Packing:
        """Packs each text up to its end token, or with all padding unless `packed`. Runs on the tokens' device.

        On the meta device, where the ends of texts are unknown, all padding remains.
        """
        texts, length = tokens_BL.shape
        end_B = end_positions(tokens_BL) if pool is Pool.end else tokens_BL.new_full((texts,), length - 1)
        if not packed or tokens_BL.is_meta:
            flat_index_T = torch.arange(texts * length, device=tokens_BL.device)
            first_B = torch.arange(texts, device=tokens_BL.device) * length
            return cls(tokens_BL.flatten(), flat_index_T % length, flat_index_T, first_B + end_B, (texts, length))
        length_B = end_B + 1
        length = int(length_B.max())
        used_BL = torch.arange(length, device=tokens_BL.device) < length_B[:, None]
        flat_index_T = used_BL.flatten().nonzero().squeeze(1)
        tokens_T = tokens_BL[:, :length][used_BL]
        return cls(tokens_T, flat_index_T % length, flat_index_T, length_B.cumsum(0) - 1, (texts, length))

    def to(self, device: torch.device) -> Packing:
        tokens_T, position_T = moved(self.tokens_T, device), moved(self.position_T, device)
        mask = None if self.mask_B1LL is None else moved(self.mask_B1LL, device)
        return Packing(
            tokens_T, position_T, moved(self.flat_index_T, device), moved(self.end_B, device), self.shape, mask
        )

    def spread(self, x_TW: Tensor) -> Tensor:
        """[T, W] -> [B, L, W], with zeros for skipped positions."""
        if len(x_TW) < self.shape[0] * self.shape[1]:
            x_TW = x_TW.new_zeros(self.shape[0] * self.shape[1], x_TW.shape[1]).index_copy(0, self.flat_index_T, x_TW)
        return x_TW.view(*self.shape, -1)

    def gather(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] -> [T, W]."""
        x = x_BLW.flatten(0, 1)
        return x if len(x) == len(self.flat_index_T) else x.index_select(0, self.flat_index_T)


def moved(x: Tensor, device: torch.device) -> Tensor:
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x  # without pinning, the host waits
    return pinned.to(device, non_blocking=True)


class TextTower(nn.Module):
    """Token ids [B, L] -> features [B, D], pooled at each text's end token, or at the last position with pool=last."""

    def __init__(self, spec: TextTowerSpec, embed_dim: int, quick_gelu: bool) -> None:
        super().__init__()
        self.context_length, self.packed, self.pool = spec.context_length, spec.packed, spec.pool
        self.token_embedding = nn.Embedding(spec.vocabulary, spec.width)
        self.positional_embedding = nn.Parameter(torch.empty(spec.context_length, spec.width))
        self.blocks = nn.ModuleList(_block(spec, quick_gelu) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width, spec.norm_eps)
        self.projection = nn.Linear(spec.width, embed_dim, bias=spec.projection_bias)
        self.init_weights()
        checkpoint_tower(self, list(self.blocks), spec.checkpointing, "model.text.checkpointing")

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws initial weights as CLIP: normal with the deviations below. Biases of attention and projection are 0,
        those of the MLP PyTorch's default."""
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        for block in self.blocks:
            assert isinstance(block, TextBlock)
            block.init_weights(depth=len(self.blocks))
        nn.init.normal_(self.projection.weight, std=self.projection.in_features**-0.5)
        if self.projection.bias is not None:
            nn.init.zeros_(self.projection.bias)

    def forward(self, tokens_BL: Tensor | Packing) -> Tensor:
        """[B, context_length] token ids -> [B, D] of any norm.

        With pool=end each row must contain an end token, as rows from Tokenizer do. The tokens may be on the host,
        where packing does not block a device, or already packed.
        """
        packing = tokens_BL if isinstance(tokens_BL, Packing) else Packing.of(tokens_BL, self.packed, self.pool)
        packing = packing.to(self.positional_embedding.device)
        x_TW = self.token_embedding(packing.tokens_T) + F.embedding(packing.position_T, self.positional_embedding)
        for block in self.blocks:
            x_TW = block(x_TW, packing)
        features_BD: Tensor = self.projection(self.norm(x_TW[packing.end_B]))
        return features_BD


def _block(spec: TextTowerSpec, quick_gelu: bool) -> TextBlock:
    return TextBlock(spec.width, spec.heads, spec.mlp_ratio, quick_gelu, spec.causal, spec.norm_eps, spec.gelu)


class TextBlock(nn.Module):
    """Attention, then MLP, both pre-norm with a residual connection. [T, W] -> [T, W]."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        quick_gelu: bool,
        causal: bool = True,
        norm_eps: float = 1e-5,
        gelu: Gelu = Gelu.exact,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, norm_eps)
        self.attn = CausalAttention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width, norm_eps)
        self.mlp = Mlp(width, int(width * mlp_ratio), quick_gelu, gelu)

    def init_weights(self, depth: int) -> None:
        """Draws initial weights. `depth`: number of blocks in the tower. Each block adds two terms to the residual
        stream, so their weights are scaled down by (2 * depth)^-.5."""
        width = self.attn.proj.in_features
        nn.init.normal_(self.attn.qkv.weight, std=width**-0.5)
        nn.init.zeros_(self.attn.qkv.bias)
        nn.init.normal_(self.attn.proj.weight, std=width**-0.5 * (2 * depth) ** -0.5)
        nn.init.zeros_(self.attn.proj.bias)
        nn.init.normal_(self.mlp.fc1.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(self.mlp.fc2.weight, std=width**-0.5 * (2 * depth) ** -0.5)

    def forward(self, x_TW: Tensor, packing: Packing) -> Tensor:
        # With float32 weights, the sums stay in float32 under autocast: only products are in the lower precision.
        x_TW = x_TW + self.attn(self.norm1(x_TW), packing)
        out_TW: Tensor = x_TW + self.mlp(self.norm2(x_TW))
        return out_TW


class CausalAttention(nn.Module):
    """Multi-head attention of a token to itself and the earlier tokens of its text, or without `causal` to all of them.
    The mask of the packing, if any, takes precedence. [T, W] -> [T, W]."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_TW: Tensor, packing: Packing) -> Tensor:
        qkv_BL3HK = packing.spread(self.qkv(x_TW)).unflatten(-1, (3, self.heads, -1))
        q_BHLK, k_BHLK, v_BHLK = qkv_BL3HK.permute(2, 0, 3, 1, 4).unbind(0)
        mask = packing.mask_B1LL
        causal = self.causal and mask is None
        mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, mask, is_causal=causal)
        out_TW: Tensor = self.proj(packing.gather(mixed_BHLK.transpose(1, 2).flatten(2)))
        return out_TW


class Mlp(nn.Module):
    """Two linear layers with a GELU between them. [..., W] -> [..., W]."""

    def __init__(self, width: int, hidden: int, quick_gelu: bool, gelu: Gelu = Gelu.exact) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = QuickGELU() if quick_gelu else nn.GELU("tanh" if gelu is Gelu.tanh else "none")
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class QuickGELU(nn.Module):
    """QuickGELU, x·sigmoid(1.702x): the approximation of GELU (arXiv:1606.08415) with which OpenAI trained CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)
