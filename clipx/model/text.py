"""The text tower: a causal transformer over byte pairs, in CLIP's shape (arXiv:2103.00020, section 2.4).

Shape suffixes: B batch, L length of a text, W width, H heads, K width of a head, D embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.model import TextTowerSpec
from clipx.model.tokenizer import Tokenizer


class TextTower(nn.Module):
    """Token ids [B, L] -> features [B, D], read at each text's end token; what follows it has no effect."""

    def __init__(self, spec: TextTowerSpec, embed_dim: int, quick_gelu: bool) -> None:
        super().__init__()
        self.context_length = spec.context_length
        self.token_embedding = nn.Embedding(Tokenizer.vocab_size, spec.width)
        self.positional_embedding = nn.Parameter(torch.empty(spec.context_length, spec.width))
        self.blocks = nn.ModuleList(
            TextBlock(spec.width, spec.heads, spec.mlp_ratio, quick_gelu) for _ in range(spec.layers)
        )
        self.norm = nn.LayerNorm(spec.width)
        self.projection = nn.Linear(spec.width, embed_dim, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """CLIP's: normal with the deviations below; attention's biases 0, the MLP's as PyTorch draws them."""
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        for block in self.blocks:
            assert isinstance(block, TextBlock)
            block.init_weights(depth=len(self.blocks))
        nn.init.normal_(self.projection.weight, std=self.projection.in_features**-0.5)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """tokens_BL [B, context_length], each row with an end token (Tokenizer sees to it) -> [B, D], any norm."""
        x_BLW = self.token_embedding(tokens_BL) + self.positional_embedding
        for block in self.blocks:
            x_BLW = block(x_BLW)
        end_B = (tokens_BL == Tokenizer.end_id).int().argmax(dim=1)  # argmax gives the first of equals
        x_BW = x_BLW[torch.arange(len(x_BLW), device=x_BLW.device), end_B]
        features_BD: Tensor = self.projection(self.norm(x_BW))
        return features_BD


class TextBlock(nn.Module):
    """Attention, then MLP, each normalised at its input and added to its input. [B, L, W] -> [B, L, W]."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, int(width * mlp_ratio), quick_gelu)

    def init_weights(self, depth: int) -> None:
        """`depth`: blocks in the tower. Each adds two terms to the residual stream, so those are drawn smaller."""
        width = self.attn.proj.in_features
        nn.init.normal_(self.attn.qkv.weight, std=width**-0.5)
        nn.init.zeros_(self.attn.qkv.bias)
        nn.init.normal_(self.attn.proj.weight, std=width**-0.5 * (2 * depth) ** -0.5)
        nn.init.zeros_(self.attn.proj.bias)
        nn.init.normal_(self.mlp.fc1.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(self.mlp.fc2.weight, std=width**-0.5 * (2 * depth) ** -0.5)

    def forward(self, x_BLW: Tensor) -> Tensor:
        # Weights in float32 keep the sums in float32 under autocast: only the products are in the lower precision.
        x_BLW = x_BLW + self.attn(self.norm1(x_BLW))
        out_BLW: Tensor = x_BLW + self.mlp(self.norm2(x_BLW))
        return out_BLW


class CausalAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what stands before it. [B, L, W] -> [B, L, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BLW: Tensor) -> Tensor:
        qkv_BL3HK: Tensor = self.qkv(x_BLW).unflatten(-1, (3, self.heads, -1))
        q_BHLK, k_BHLK, v_BHLK = qkv_BL3HK.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True)
        out_BLW: Tensor = self.proj(mixed_BHLK.transpose(1, 2).flatten(2))
        return out_BLW


class Mlp(nn.Module):
    """Two linear layers with a GELU between. [..., W] -> [..., W]."""

    def __init__(self, width: int, hidden: int, quick_gelu: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = QuickGELU() if quick_gelu else nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class QuickGELU(nn.Module):
    """x·sigmoid(1.702x), the approximation of GELU (arXiv:1606.08415) with which OpenAI trained CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)
