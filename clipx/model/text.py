"""The text tower: a causal transformer over byte pairs, in CLIP's shape (arXiv:2103.00020, section 2.4).

CLIP pools a text at its end token, and under causal attention later tokens have no effect on it. The padding after it
is therefore skipped: the tokens of all texts are concatenated (see packing). The last block computes its projection
and MLP for the pooled tokens alone.

Shape suffixes: B batch, L length of the longest text, T tokens of all texts, W width, H heads, K width of a head, D
embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent, GluMlp, Mlp, QuickGELU
from torch import Tensor, nn

from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.packing import Packing, attention, packed_on
from clipx.model.text_spec import ClipTextSpec, Gelu, Norm, Pool, Positions, TextProjection
from clipx.model.text_spec import Mlp as MlpKind
from clipx.model.tower_spec import check_width


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
        check_width("text", embed_dim, width, "the width of the text tower")
        return nn.Identity()
    if kind is TextProjection.linear:
        return nn.Linear(width, embed_dim, bias)
    mlp: nn.Module = Mlp(width, (width + embed_dim) // 2, embed_dim, bias=False)
    return mlp


def mlp(width: int, hidden: int, quick_gelu: bool, gelu: Gelu = Gelu.exact, bias: bool = True) -> nn.Module:
    """Returns two linear layers with a GELU between them. [..., W] -> [..., W]."""
    act = QuickGELU if quick_gelu else partial(nn.GELU, "tanh" if gelu is Gelu.tanh else "none")
    found: nn.Module = Mlp(width, hidden, act_layer=act, bias=bias)
    return found


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
        self.blocks = nn.ModuleList(TextBlock(spec, quick_gelu) for _ in range(spec.layers))
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

    def __init__(self, spec: ClipTextSpec, quick_gelu: bool) -> None:
        super().__init__()
        hidden = int(spec.width * spec.mlp_ratio)
        self.norm1 = _norm(spec)
        self.attn = TextAttention(spec)
        self.norm2 = _norm(spec)
        if spec.mlp is MlpKind.swiglu:
            self.mlp: Any = GluMlp(spec.width, 2 * hidden, act_layer=nn.SiLU, bias=spec.bias, gate_last=False)
        else:
            self.mlp = mlp(spec.width, hidden, quick_gelu, spec.gelu, spec.bias)

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
    """

    def __init__(self, spec: ClipTextSpec) -> None:
        super().__init__()
        self.heads, self.causal = spec.heads, spec.causal
        self.rotary_base = spec.rotary_base if spec.positions is Positions.rotary else None
        self.qkv = nn.Linear(spec.width, 3 * spec.width, spec.bias)
        self.proj = nn.Linear(spec.width, spec.width, spec.bias)

    def forward(self, x_TW: Tensor, packing: Packing) -> Tensor:
        qkv_TW3 = self.qkv(x_TW)
        if self.rotary_base is not None:
            qkv_T3HK = qkv_TW3.unflatten(-1, (3, self.heads, -1))
            qkv_TW3 = rotated(qkv_T3HK, packing.position_T, self.rotary_base).flatten(1)
        return attention(qkv_TW3, packing, self.heads, self.causal)


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
