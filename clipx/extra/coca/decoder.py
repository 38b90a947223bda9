"""CoCa's decoder: predicts the next token of a text from the text so far and the image (arXiv:2205.01917).

Shape suffixes: B batch, L length of the longest text, T tokens of all texts, W width, N tokens of an image, S their
width, Q queries, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipx.extra.coca.spec import DecoderSpec
from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.packing import Packing, end_positions
from clipx.model.text import TextBlock, mlp
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer
from clipx.model.transfer import moved

SCORED_AT_ONCE = 8192
"""Largest number of tokens whose scores of the whole vocabulary are in memory at a time, 1.6 GB in float32. For more
tokens the backward pass recomputes the scores."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., L, W] -> [..., H, L, K]."""
    parts: Tensor = x.unflatten(-1, (heads, -1))
    return parts.transpose(-3, -2)


def join_heads(x: Tensor) -> Tensor:
    """[..., H, L, K] -> [..., L, W]."""
    return x.transpose(-3, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class Captions:
    """Inputs and targets of the decoder: T' of the T tokens of packed texts, and the token that follows each.

    The end token of each text, which has no next token, and everything after it are skipped.
    """

    source_T: Tensor  # index in T of each input, [T']
    packing: Packing  # its tokens are the targets, [T']
    counted_T1: Tensor | None  # 0 for positions without a target that were not skipped, else 1; None: all have one
    count_B: Tensor  # number of targets of each text: all tokens but its start

    @classmethod
    def pack(cls, tokens_BL: Tensor, texts: Packing) -> Captions:
        """Builds them on the device of `tokens_BL`. `texts`: the same texts packed, each ending in its class token."""
        end_B = end_positions(tokens_BL)
        count, length = texts.shape
        read = tokens_BL.shape[1] - 1
        if len(texts.flat_index_T) == count * (read + 2):  # nothing was skipped
            source_T = torch.arange(count * length, device=tokens_BL.device).view(count, length)[:, :read].flatten()
            flat_index_T = torch.arange(count * read, device=tokens_BL.device)
            counted_BL = torch.arange(read, device=tokens_BL.device) < end_B[:, None]
            packing = Packing(tokens_BL[:, 1:].flatten(), flat_index_T % read, flat_index_T, end_B, (count, read))
            return cls(source_T, packing, counted_BL.flatten()[:, None], end_B)
        text_T, position_T = texts.flat_index_T // length, texts.flat_index_T % length
        source_T = (position_T < end_B[text_T]).nonzero().squeeze(1)
        text_T, position_T, read = text_T[source_T], position_T[source_T], int(end_B.max())
        packing = Packing(
            tokens_BL[text_T, position_T + 1], position_T, text_T * read + position_T, end_B, (count, read)
        )
        return cls(source_T, packing, None, end_B)

    def to(self, device: torch.device) -> Captions:
        counted_T1 = None if self.counted_T1 is None else moved(self.counted_T1, device)
        return Captions(moved(self.source_T, device), self.packing.to(device), counted_T1, moved(self.count_B, device))


class CaptionDecoder(nn.Module):
    """Output tokens of the text tower [T, W] and tokens of their images [B, N, W] -> -log p of each caption [B]."""

    blocks_name: ClassVar[str] = "blocks"

    def __init__(self, spec: DecoderSpec, width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            DecoderBlock(width, spec.heads, spec.mlp_ratio, quick_gelu) for _ in range(spec.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, Tokenizer.vocab_size, bias=False)
        self.init_weights()
        checkpoint_tower(self, list(self.blocks), spec.checkpointing, "model.decoder.checkpointing")

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws initial weights as the text tower does."""
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            block.init_weights(depth=2 * len(self.blocks))
        nn.init.normal_(self.head.weight, std=self.head.in_features**-0.5)

    def forward(self, x_TW: Tensor, image_BNW: Tensor, captions: Captions) -> Tensor:
        """Returns -log p of each caption, summed over its tokens, [B] in float32 or wider."""
        packing = captions.packing
        x_TW = x_TW.index_select(0, captions.source_T)
        for block in self.blocks:
            x_TW = block(x_TW, image_BNW, packing)
        parts = zip(x_TW.split(SCORED_AT_ONCE), packing.tokens_T.split(SCORED_AT_ONCE), strict=True)
        if len(x_TW) <= SCORED_AT_ONCE:
            loss_T = torch.cat([self.token_losses(*part) for part in parts])
        else:
            loss_T = torch.cat([checkpoint(self.token_losses, *part, use_reentrant=False) for part in parts])
        loss_T1 = loss_T[:, None] if captions.counted_T1 is None else loss_T[:, None] * captions.counted_T1
        return packing.spread(loss_T1).sum((1, 2))

    def token_losses(self, x_TW: Tensor, next_T: Tensor) -> Tensor:
        """Returns -log p of the token that follows each token, [T]."""
        return F.cross_entropy(self.scores(x_TW), next_T, reduction="none")

    def scores(self, x_TW: Tensor) -> Tensor:
        """Returns the logits of the next token, [T, V] in float32 or wider."""
        scores_TV: Tensor = self.head(self.norm(x_TW))
        return scores_TV.to(torch.promote_types(scores_TV.dtype, torch.float32))


class DecoderBlock(nn.Module):
    """Self-attention block over the text, then cross-attention block to the image. [T, W] -> [T, W]."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.text = TextBlock(ClipTextSpec(width=width, heads=heads, mlp_ratio=mlp_ratio), quick_gelu)
        self.cross = CrossBlock(width, heads, mlp_ratio, quick_gelu)

    def init_weights(self, depth: int) -> None:
        self.text.init_weights(depth)
        self.cross.init_weights(depth)

    def forward(self, x_TW: Tensor, image_BNW: Tensor, packing: Packing) -> Tensor:
        out_TW: Tensor = self.cross(self.text(x_TW, packing), image_BNW, packing)
        return out_TW


class CrossBlock(nn.Module):
    """Cross-attention to the image, then MLP, both pre-norm with a residual connection. [T, W] -> [T, W]."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, quick_gelu: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm_image = nn.LayerNorm(width)
        self.attn = CrossAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp: Any = mlp(width, int(width * mlp_ratio), quick_gelu)

    def init_weights(self, depth: int) -> None:
        """Draws initial weights as TextBlock does."""
        width = self.attn.proj.in_features
        nn.init.normal_(self.attn.weight, std=width**-0.5)
        nn.init.zeros_(self.attn.bias)
        nn.init.normal_(self.attn.proj.weight, std=width**-0.5 * (2 * depth) ** -0.5)
        nn.init.zeros_(self.attn.proj.bias)
        nn.init.normal_(self.mlp.fc1.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(self.mlp.fc2.weight, std=width**-0.5 * (2 * depth) ** -0.5)

    def forward(self, x_TW: Tensor, image_BNW: Tensor, packing: Packing) -> Tensor:
        mixed_BLW = self.attn(packing.spread(self.norm1(x_TW)), *self.keys_values(image_BNW))
        x_TW = x_TW + self.attn.proj(packing.gather(mixed_BLW))
        out_TW: Tensor = x_TW + self.mlp(self.norm2(x_TW))
        return out_TW

    def keys_values(self, image_BNW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the image tokens, each [B, H, N, K]: the same for all tokens of a caption."""
        return self.attn.keys_values(self.norm_image(image_BNW))


class CrossAttention(nn.Module):
    """Multi-head attention of the text to the image, without the output projection, which the caller applies."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # Queries, keys and values in one tensor, as in open_clip, so that optimizer states match too.
        self.weight = nn.Parameter(torch.empty(3 * width, width))
        self.bias = nn.Parameter(torch.empty(3 * width))
        self.proj = nn.Linear(width, width)

    def forward(self, x_BLW: Tensor, keys_BHNK: Tensor, values_BHNK: Tensor) -> Tensor:
        width = x_BLW.shape[-1]
        q_BHLK = split_heads(F.linear(x_BLW, self.weight[:width], self.bias[:width]), self.heads)
        return join_heads(F.scaled_dot_product_attention(q_BHLK, keys_BHNK, values_BHNK))

    def keys_values(self, source_BNW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values, each [B, H, N, K]."""
        width = source_BNW.shape[-1]
        keys_BNW, values_BNW = F.linear(source_BNW, self.weight[width:], self.bias[width:]).chunk(2, -1)
        return split_heads(keys_BNW, self.heads), split_heads(values_BNW, self.heads)


class AttentionPool(nn.Module):
    """Attention pool of Q learned queries over normalized image tokens. [B, N, S] -> [B, Q, W]."""

    def __init__(self, width: int, heads: int, source_width: int, queries: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.empty(queries, width))
        self.norm = nn.LayerNorm(width)
        self.q_weight = nn.Parameter(torch.empty(width, width))
        self.k_weight = nn.Parameter(torch.empty(width, source_width))
        self.v_weight = nn.Parameter(torch.empty(width, source_width))
        self.bias = nn.Parameter(torch.zeros(3 * width))  # of queries, keys, values
        self.proj = nn.Linear(width, width)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws queries as open_clip does, normal with deviation 1, and matrices normal with deviation (inputs)^-.5."""
        nn.init.normal_(self.query)
        for weight in (self.q_weight, self.k_weight, self.v_weight, self.proj.weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.zeros_(self.proj.bias)

    def forward(self, source_BNS: Tensor) -> Tensor:
        q, k, v = self.bias.chunk(3)
        q_HQK = split_heads(F.linear(self.norm(self.query), self.q_weight, q), self.heads)
        keys_BHNK = split_heads(F.linear(source_BNS, self.k_weight, k), self.heads)
        values_BHNK = split_heads(F.linear(source_BNS, self.v_weight, v), self.heads)
        q_BHQK = q_HQK.expand(len(source_BNS), -1, -1, -1)
        pooled_BQW: Tensor = self.proj(join_heads(F.scaled_dot_product_attention(q_BHQK, keys_BHNK, values_BHNK)))
        return pooled_BQW
