"""Packed sequences: the tokens of texts, or of images, one after the other without padding, and attention within each.

Only where no attention over sequences of different lengths exists (see varlen), attention pads them to one length.

Shape suffixes: B batch, L length of the longest text, T tokens of all texts, S segments of tokens that attend to each
other (texts, and parts of the padding), W width, H heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipx.model.tokenizer import TextEnd, Tokenizer
from clipx.model.transfer import moved
from clipx.model.varlen import is_supported, varlen_attention

CLIP_END = TextEnd(Tokenizer.end_id)


def end_positions(tokens_BL: Tensor) -> Tensor:
    """Returns the position of each text's first end token of CLIP's tokenizer, [B]."""
    return CLIP_END.positions(tokens_BL)


CUDA_MULTIPLE = 1024
"""Multiple to which Packing.pack rounds the number of tokens for CUDA, where each new shape costs memory and tuning."""

_SEGMENT = 16  # tokens of a segment of padding
_TILE = 128  # tokens of a tile of flash attention, whose grid has as many for any length up to it


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
    def pack(cls, tokens_BL: Tensor, packed: bool, end: TextEnd = CLIP_END, multiple: int = 1) -> Packing:
        """Packs each text up to its last token, or with all padding unless `packed`. Runs on the tokens' device.

        Packed texts are in order of their lengths. `multiple`: see `rounded`. On the meta device, where the ends of
        texts are unknown, all padding remains.
        """
        texts, length = tokens_BL.shape
        end_B = end.positions(tokens_BL)
        if not packed or tokens_BL.is_meta:
            flat_index_T = torch.arange(texts * length, device=tokens_BL.device)
            first_B = torch.arange(texts, device=tokens_BL.device) * length
            position_T = flat_index_T % length
            whole = (texts, length)
            return cls(tokens_BL.flatten(), position_T, flat_index_T, first_B + end_B, whole, first_B=first_B)
        found = cls.pack_lengths(end_B + 1)
        tokens_T = tokens_BL[:, : found.shape[1]].flatten()[found.tokens_T]
        return replace(found, tokens_T=tokens_T).rounded(multiple)

    @classmethod
    def pack_lengths(cls, length_B: Tensor) -> Packing:
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
        """Pads the tokens to a multiple of `multiple`, or of the largest power of two below it that adds at most 1/16,
        and the segments to a fixed number by empty ones, so that batches repeat their shapes. Fewer than 256 tokens are
        not padded."""
        tokens, step = len(self.tokens_T), min(multiple, 1 << max(0, (len(self.tokens_T) // 16).bit_length() - 1))
        if step < _SEGMENT or self.start_S is None:
            return self
        extra = -tokens % step
        more = torch.arange(1, 1 + multiple // _SEGMENT, device=self.start_S.device)
        return replace(
            self,
            tokens_T=torch.cat([self.tokens_T, self.tokens_T[:1].expand(extra)]),
            position_T=F.pad(self.position_T, (0, extra)),
            start_S=torch.cat([self.start_S, (tokens + (more * _SEGMENT).clamp(max=extra)).int()]),
        )

    @property
    def longest(self) -> int:
        """Upper bound of a segment's length, in whole tiles: one number for most batches."""
        return -(-self.shape[1] // _TILE) * _TILE

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


@dataclass(frozen=True, slots=True)
class TextPacker:
    """Packs texts for a text tower. Pickled to loader processes."""

    packed: bool
    """Skips the padding of each text, as model.text.packed."""

    end: TextEnd = CLIP_END
    multiple: int = 1
    """Multiple to which the number of packed tokens is rounded."""

    def __call__(self, tokens_BL: Tensor) -> Any:
        """Returns the texts in a form that the model takes in place of tokens: a dataclass of tensors."""
        return Packing.pack(tokens_BL, self.packed, self.end, self.multiple)

    def count(self, tokens_BL: Tensor) -> int:
        """Returns the number of tokens that the text tower computes: all, or, if packed, those up to each text's end.

        Class tokens and the padding to a multiple are not counted.
        """
        if not self.packed or not tokens_BL.shape[1]:
            return tokens_BL.numel()
        return int(self.end.positions(tokens_BL).sum()) + len(tokens_BL)


def packed_on(device: torch.device, tokens_BL: Tensor | Packing, packed: bool, end: TextEnd) -> Packing:
    """Returns texts on the device. They are packed where they are, unless they are packed already."""
    if isinstance(tokens_BL, Tensor):
        tokens_BL = Packing.pack(tokens_BL, packed, end, CUDA_MULTIPLE if device.type == "cuda" else 1)
    return tokens_BL.to(device)


def attention(qkv_TW3: Tensor, packing: Packing, heads: int, causal: bool) -> Tensor:
    """Attends within each sequence. Queries, keys and values [T, 3 * W] -> [T, W].

    `causal`: to itself and earlier tokens only. The mask of the packing, if any, takes precedence.
    """
    packed, width = packing.start_S is not None, qkv_TW3.shape[-1] // (3 * heads)
    if packing.start_S is not None and is_supported(qkv_TW3.device, qkv_TW3.dtype, width):
        qkv_T3HK = qkv_TW3.unflatten(-1, (3, heads, -1))
        return varlen_attention(qkv_T3HK, packing.start_S, packing.longest, causal).flatten(1)
    qkv_BL3HK = packing.spread(qkv_TW3).unflatten(-1, (3, heads, -1))
    q_BHLK, k_BHLK, v_BHLK = qkv_BL3HK.permute(2, 0, 3, 1, 4).unbind(0)
    mask = packing.mask_B1LL
    if mask is None and packed and not causal:
        mask = packing.used_BL()[:, None, None]
    mixed_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, mask, is_causal=causal and mask is None)
    return packing.gather(mixed_BHLK.transpose(1, 2).flatten(2))
