"""The text tower: a causal transformer over byte pairs, in CLIP's shape (arXiv:2103.00020, section 2.4).

CLIP pools a text at its end token, and under causal attention later tokens have no effect on it. The padding after it
is therefore skipped: the tokens of all texts are concatenated. Only where no attention over texts of different lengths
exists (see varlen), attention pads the texts to one length. The last block computes its projection and MLP for the
pooled tokens alone.

Shape suffixes: B batch, L length of the longest text, T tokens of all texts, S segments of tokens that attend to each
other (texts, and parts of the padding), W width, H heads, K width of a head, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from clipx.errors import require
from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.text_end import TextEnd
from clipx.model.text_spec import ClipTextSpec, Gelu, Norm, Pool, Positions, TextProjection
from clipx.model.text_spec import Mlp as MlpKind
from clipx.model.tokenizer import Tokenizer
from clipx.model.varlen import is_supported, varlen_attention

CLIP_END = TextEnd(Tokenizer.end_id)


def end_positions(tokens_BL: Tensor) -> Tensor:
    """Returns the position of each text's first end token of CLIP's tokenizer, [B]."""
    return CLIP_END.positions(tokens_BL)


CUDA_MULTIPLE = 1024
"""Multiple to which Packing.of rounds the number of tokens for CUDA, where each new shape costs memory and tuning."""

_SEGMENT = 16  # tokens of a segment of padding


@dataclass(frozen=True, slots=True)
class Packing:
    """B texts packed as T tokens, with their positions in [B, L].

    T may include padding after the texts, in segments of its own: copies of the first text's first token, which neither
    add a value to what a tensor holds nor have a gradient.
    """

    tokens_T: Tensor
    position_T: Tensor  # position in the token's text
    flat_index_T: Tensor  # index among all B * L positions; without the padding
    end_B: Tensor  # index in T of each text's last token, or of its class token
    shape: tuple[int, int]  # (B, L)
    mask_B1LL: Tensor | None = None  # True where a position (row) attends to another; None: to itself and earlier ones
    start_S: Tensor | None = None  # first token of each segment, then T, int32 [S + 1]; None: not contiguous segments
    first_B: Tensor | None = None  # index in T of each text's first token; None: not known

    @classmethod
    def of(cls, tokens_BL: Tensor, packed: bool, end: TextEnd = CLIP_END, multiple: int = 1) -> Packing:
        """Packs each text up to its last token, or with all padding unless `packed`. Runs on the tokens' device.

        Packed texts are in order of their lengths. Their number of tokens is rounded up to a multiple of `multiple`,
        or of the largest power of two below it that adds at most 1/64; see `rounded`. On the meta device, where the
        ends of texts are unknown, all padding remains.
        """
        texts, length = tokens_BL.shape
        end_B = end.positions(tokens_BL)
        if not packed or tokens_BL.is_meta:
            flat_index_T = torch.arange(texts * length, device=tokens_BL.device)
            first_B = torch.arange(texts, device=tokens_BL.device) * length
            position_T = flat_index_T % length
            whole = (texts, length)
            return cls(tokens_BL.flatten(), position_T, flat_index_T, first_B + end_B, whole, first_B=first_B)
        found = cls.of_lengths(end_B + 1)
        tokens_T = tokens_BL[:, : found.shape[1]].flatten()[found.tokens_T]
        return replace(found, tokens_T=tokens_T).rounded(multiple)

    @classmethod
    def of_lengths(cls, length_B: Tensor) -> Packing:
        """Packs the first `length_B` tokens of the rows of [B, L], in order of their lengths, where L is the longest.

        tokens_T: the index of each token among all B * L positions.
        """
        texts, device = len(length_B), length_B.device
        sorted_B, text_B = length_B.sort(stable=True)
        longest = int(sorted_B[-1])
        at_L = torch.arange(longest, device=device)
        used_BL = at_L < sorted_B[:, None]
        flat_index_T = (text_B[:, None] * longest + at_L)[used_BL]
        stop_B = sorted_B.cumsum(0)
        first_B = torch.empty_like(stop_B).index_copy_(0, text_B, stop_B - sorted_B)
        start_S = F.pad(stop_B, (1, 0)).int()
        return cls(
            tokens_T=flat_index_T,
            position_T=flat_index_T % longest,
            flat_index_T=flat_index_T,
            end_B=first_B + length_B - 1,
            shape=(texts, longest),
            start_S=start_S,
            first_B=first_B,
        )

    def rounded(self, multiple: int) -> Packing:
        """Pads to a multiple of tokens, so that batches repeat their shapes. Fewer than 1024 tokens are not padded."""
        tokens = len(self.tokens_T)
        multiple = min(multiple, 1 << max(0, (tokens // 64).bit_length() - 1))
        extra = -tokens % multiple
        if multiple < _SEGMENT or not extra or self.start_S is None:
            return self
        starts = torch.arange(tokens, tokens + extra, _SEGMENT, dtype=torch.int32, device=self.start_S.device)
        return replace(
            self,
            tokens_T=torch.cat([self.tokens_T, self.tokens_T[:1].expand(extra)]),
            position_T=F.pad(self.position_T, (0, extra)),
            start_S=torch.cat([self.start_S[:-1], starts, starts.new_full((1,), tokens + extra)]),
        )

    @property
    def longest(self) -> int:
        """Upper bound of a segment's length."""
        return max(self.shape[1], _SEGMENT)

    def by_text(self, x_TW: Tensor) -> tuple[Tensor, Tensor]:
        """[T, W] -> ([B, L, W] of each text's tokens from its first to its last, [B, L] which of these positions are
        used). Others have the features of some other token."""
        assert self.first_B is not None
        index_BL = self.first_B[:, None] + torch.arange(self.shape[1], device=x_TW.device)
        used_BL = index_BL <= self.end_B[:, None]
        return F.embedding(index_BL.clamp(max=len(x_TW) - 1), x_TW), used_BL

    def to(self, device: torch.device) -> Packing:
        return self._with_each(lambda x: moved(x, device))

    def pin_memory(self) -> Packing:
        return self._with_each(Tensor.pin_memory)

    def _with_each(self, call: Callable[[Tensor], Tensor]) -> Packing:
        """Returns the packing with `call` applied to each tensor."""
        tensors = {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        changed: dict[str, Any] = {name: call(x) for name, x in tensors.items()}
        return replace(self, **changed)

    def spread(self, x_TW: Tensor) -> Tensor:
        """[T, W] -> [B, L, W], with zeros for skipped positions."""
        if len(self.flat_index_T) < self.shape[0] * self.shape[1]:
            x_TW = x_TW[: len(self.flat_index_T)]
            x_TW = x_TW.new_zeros(self.shape[0] * self.shape[1], x_TW.shape[1]).index_copy(0, self.flat_index_T, x_TW)
        return x_TW.view(*self.shape, -1)

    def used_BL(self) -> Tensor:
        """Returns which positions of [B, L] belong to a text, from its first to its last token."""
        used = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=self.flat_index_T.device)
        return used.index_fill(0, self.flat_index_T, True).view(self.shape)

    def gather(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] -> [T, W], with zeros for padding after the texts."""
        x = x_BLW.flatten(0, 1)
        if len(x) == len(self.flat_index_T):
            return x
        x = x.index_select(0, self.flat_index_T)
        return F.pad(x, (0, 0, 0, len(self.tokens_T) - len(x)))


def moved(x: Tensor, device: torch.device) -> Tensor:
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x  # without pinning, the host waits
    return pinned.to(device, non_blocking=True)


def packed_on(device: torch.device, tokens_BL: Tensor | Packing, packed: bool, end: TextEnd) -> Packing:
    """Returns texts on the device. They are packed where they are, unless they are packed already."""
    if isinstance(tokens_BL, Tensor):
        tokens_BL = Packing.of(tokens_BL, packed, end, CUDA_MULTIPLE if device.type == "cuda" else 1)
    return tokens_BL.to(device)


class TextPool(nn.Module):
    """Features of tokens [T, W] -> features of texts [B, W]."""

    def __init__(self, pool: Pool, width: int, heads: int) -> None:
        super().__init__()
        self.pool = pool
        self.attention = None
        if pool is Pool.map:
            self.attention = AttentionPoolLatent(width, num_heads=heads, norm_layer=nn.LayerNorm)

    @property
    def reads_last(self) -> bool:
        """True if it reads the last token of a text only."""
        return self.pool in (Pool.end, Pool.last)

    def forward(self, x_TW: Tensor, packing: Packing) -> Tensor:
        if self.reads_last:
            return x_TW.index_select(0, packing.end_B)
        if self.pool is Pool.cls:
            assert packing.first_B is not None
            return x_TW.index_select(0, packing.first_B)
        x_BLW, used_BL = packing.by_text(x_TW)
        if self.attention is not None:
            pooled_BW: Tensor = self.attention(x_BLW, attn_mask=used_BL[:, None, None])
            return pooled_BW
        if self.pool is Pool.max:
            return x_BLW.masked_fill(~used_BL[..., None], -torch.inf).amax(1)
        used_BL1 = used_BL[..., None].to(x_BLW.dtype)
        return (x_BLW * used_BL1).sum(1) / used_BL1.sum(1)


def text_projection(kind: TextProjection, width: int, embed_dim: int, bias: bool = False) -> nn.Module:
    """Returns the projection [B, W] -> [B, D], to be initialized by `init_projection`.

    Raises ConfigError for none with another width than the embedding's.
    """
    if kind is TextProjection.none:
        require(
            width == embed_dim,
            f"model.text.projection=none needs model.embed_dim={width}, the width of the text tower, not {embed_dim}: "
            "set it, or remove model.text.projection",
        )
        return nn.Identity()
    if kind is TextProjection.linear:
        return nn.Linear(width, embed_dim, bias)
    return Mlp(width, (width + embed_dim) // 2, quick_gelu=False, bias=False, out=embed_dim)


@torch.no_grad()
def init_projection(projection: nn.Module) -> None:
    """Draws initial weights: normal with deviation (their inputs)^-.5, biases 0."""
    for module in projection.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class TextTower(nn.Module):
    """Token ids [B, L] -> features [B, D]."""

    blocks_name: ClassVar[str] = "blocks"
    """Name of the list of blocks."""

    def __init__(self, spec: ClipTextSpec, embed_dim: int, quick_gelu: bool) -> None:
        super().__init__()
        self.context_length, self.packed, self.end = spec.context_length, spec.packed, spec.end
        self.token_embedding = nn.Embedding(spec.vocabulary, spec.width)
        self.positional_embedding: nn.Parameter | None = None
        if spec.positions is Positions.learned:
            self.positional_embedding = nn.Parameter(torch.empty(spec.context_length, spec.width))
        self.blocks = nn.ModuleList(TextBlock.of(spec, quick_gelu) for _ in range(spec.layers))
        self.norm = _norm(spec)
        self.pool = TextPool(spec.pool, spec.width, spec.heads)
        self.projection = text_projection(spec.projection, spec.width, embed_dim, spec.projection_bias)
        self.init_weights()
        checkpoint_tower(self, list(self.blocks), spec.checkpointing, "model.text.checkpointing")

    @property
    def embedding_weight(self) -> Tensor:
        """The token embedding, whose device and dtype are those of the tower."""
        return self.token_embedding.weight

    def positional_embeddings(self) -> set[str]:
        """Returns the names of learned positional embeddings."""
        return set() if self.positional_embedding is None else {"positional_embedding"}

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws initial weights as CLIP: normal with the deviations below. Biases of attention and projection are 0,
        those of the MLP PyTorch's default."""
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        if self.positional_embedding is not None:
            nn.init.normal_(self.positional_embedding, std=0.01)
        for block in self.blocks:
            assert isinstance(block, TextBlock)
            block.init_weights(depth=len(self.blocks))
        init_projection(self.projection)

    def forward(self, tokens_BL: Tensor | Packing) -> Tensor:
        """[B, context_length] token ids -> [B, D] of any norm.

        With pool=end each row must contain an end token, as rows from Tokenizer do. The tokens may be on the host,
        where packing does not block a device, or already packed.
        """
        packing = packed_on(self.token_embedding.weight.device, tokens_BL, self.packed, self.end)
        x_TW = self.token_embedding(packing.tokens_T)
        if self.positional_embedding is not None:
            x_TW = x_TW + F.embedding(packing.position_T, self.positional_embedding)
        *lower, last = self.blocks
        for block in lower:
            x_TW = block(x_TW, packing)
        if self.pool.reads_last:
            pooled_BW = self.norm(last(x_TW, packing, True))
        else:
            pooled_BW = self.pool(self.norm(last(x_TW, packing)), packing)
        features_BD: Tensor = self.projection(pooled_BW)
        return features_BD


def _norm(spec: ClipTextSpec) -> nn.Module:
    if spec.norm is Norm.rms:
        return nn.RMSNorm(spec.width, spec.norm_eps)
    return nn.LayerNorm(spec.width, spec.norm_eps, bias=spec.bias)


class TextBlock(nn.Module):
    """Attention, then MLP, both pre-norm with a residual connection. [T, W] -> [T, W].

    With `pooled` it computes only the last token of each text: [T, W] -> [B, W].
    """

    def __init__(self, norm1: nn.Module, attn: TextAttention, norm2: nn.Module, mlp: Mlp | SwiGLU) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm1, attn, norm2
        self.mlp: Mlp | SwiGLU = mlp

    @classmethod
    def of(cls, spec: ClipTextSpec, quick_gelu: bool) -> TextBlock:
        base = spec.rotary_base if spec.positions is Positions.rotary else None
        hidden = int(spec.width * spec.mlp_ratio)
        attention = TextAttention(spec.width, spec.heads, spec.causal, spec.bias, base)
        mlp: Mlp | SwiGLU
        if spec.mlp is MlpKind.swiglu:
            mlp = SwiGLU(spec.width, hidden, spec.bias)
        else:
            mlp = Mlp(spec.width, hidden, quick_gelu, spec.gelu, spec.bias)
        return cls(_norm(spec), attention, _norm(spec), mlp)

    def init_weights(self, depth: int) -> None:
        """Draws initial weights. `depth`: number of blocks in the tower. Each block adds two terms to the residual
        stream, so their weights are scaled down by (2 * depth)^-.5."""
        width = self.attn.proj.in_features
        nn.init.normal_(self.attn.qkv.weight, std=width**-0.5)
        nn.init.normal_(self.attn.proj.weight, std=width**-0.5 * (2 * depth) ** -0.5)
        for linear in (self.attn.qkv, self.attn.proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        nn.init.normal_(self.mlp.fc1.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(self.mlp.fc2.weight, std=width**-0.5 * (2 * depth) ** -0.5)

    def forward(self, x_TW: Tensor, packing: Packing, pooled: bool = False) -> Tensor:
        # With float32 weights, the sums stay in float32 under autocast: only products are in the lower precision.
        mixed_TW = self.attn(self.norm1(x_TW), packing)
        if pooled:
            x_TW, mixed_TW = (x.index_select(0, packing.end_B) for x in (x_TW, mixed_TW))
        x_TW = x_TW + self.attn.proj(mixed_TW)
        out_TW: Tensor = x_TW + self.mlp(self.norm2(x_TW))
        return out_TW


class TextAttention(nn.Module):
    """Multi-head attention of a token to itself and the earlier tokens of its text, or without `causal` to all of them,
    without the output projection, which the caller applies. Packed texts do not attend to padding. The mask of the
    packing, if any, takes precedence. [T, W] -> [T, W].

    `rotary_base`: base of rotary positions (arXiv:2104.09864); None: without.
    """

    def __init__(
        self, width: int, heads: int, causal: bool = True, bias: bool = True, rotary_base: float | None = None
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.rotary_base = heads, causal, rotary_base
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.proj = nn.Linear(width, width, bias)

    def forward(self, x_TW: Tensor, packing: Packing) -> Tensor:
        qkv_TW3 = self.qkv(x_TW)
        if self.rotary_base is not None:
            qkv_T3HK = qkv_TW3.unflatten(-1, (3, self.heads, -1))
            qkv_TW3 = rotated(qkv_T3HK, packing.position_T, self.rotary_base).flatten(1)
        return attention(qkv_TW3, packing, self.heads, self.causal)


def attention(qkv_TW3: Tensor, packing: Packing, heads: int, causal: bool) -> Tensor:
    """Attends within each text, see TextAttention. Queries, keys and values [T, 3 * W] -> [T, W]."""
    packed = packing.start_S is not None
    if packing.start_S is not None and is_supported(qkv_TW3.device, qkv_TW3.dtype):
        qkv_T3HK = qkv_TW3.unflatten(-1, (3, heads, -1))
        return varlen_attention(qkv_T3HK, packing.start_S, packing.longest, causal).flatten(1)
    qkv_BL3HK = packing.spread(qkv_TW3).unflatten(-1, (3, heads, -1))
    q_BHLK, k_BHLK, v_BHLK = qkv_BL3HK.permute(2, 0, 3, 1, 4).unbind(0)
    mask = packing.mask_B1LL
    if mask is None and packed and not causal:
        mask = packing.used_BL()[:, None, None]
    mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, mask, is_causal=causal and mask is None)
    return packing.gather(mixed_BHLK.transpose(1, 2).flatten(2))


def rotated(qkv_T3HK: Tensor, position_T: Tensor, base: float) -> Tensor:
    """Rotates queries and keys by their positions (arXiv:2104.09864), each feature of the first half of K with the
    feature of the same index in the second half."""
    half = qkv_T3HK.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=position_T.device) / half)
    angle_T1 = position_T[:, None, None, None] * frequency
    qk_T2HK = qkv_T3HK[:, :2]
    cos, sin = angle_T1.cos().to(qk_T2HK.dtype), angle_T1.sin().to(qk_T2HK.dtype)
    first, second = qk_T2HK[..., :half], qk_T2HK[..., half:]
    turned_T2HK = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned_T2HK, qkv_T3HK[:, 2:]], 1)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them. [..., W] -> [..., W], or `out` features."""

    def __init__(
        self,
        width: int,
        hidden: int,
        quick_gelu: bool,
        gelu: Gelu = Gelu.exact,
        bias: bool = True,
        out: int | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias)
        self.act = QuickGELU() if quick_gelu else nn.GELU("tanh" if gelu is Gelu.tanh else "none")
        self.fc2 = nn.Linear(hidden, width if out is None else out, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class SwiGLU(nn.Module):
    """Gated MLP (arXiv:2002.05202): fc2(silu(a) * b), where fc1 gives a and b, each of `hidden` features.
    [..., W] -> [..., W]."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden, bias)
        self.fc2 = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(F.silu(gate) * value)
        return out


class QuickGELU(nn.Module):
    """QuickGELU, x·sigmoid(1.702x): the approximation of GELU (arXiv:1606.08415) with which OpenAI trained CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)
