"""Packers: token ids to the packed texts that a model takes, on the host, where loader processes run them.

Shape suffixes: B batch, L length of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipx.model.packing import CLIP_END, Packing
from clipx.model.tokenizer import TextEnd


@dataclass(frozen=True, slots=True)
class TextPacker:
    """Packs texts for a text tower. Pickled to loader processes."""

    packed: bool
    """Skips the padding of each text, as model.text.packed."""

    end: TextEnd = CLIP_END
    multiple: int = 1
    """Multiple to which the number of packed tokens is rounded, see Packing.of."""

    def __call__(self, tokens_BL: Tensor) -> Any:
        """Returns the texts in a form that the model takes in place of tokens: a dataclass of tensors."""
        return Packing.of(tokens_BL, self.packed, self.end, self.multiple)

    def count(self, tokens_BL: Tensor) -> int:
        """Returns the number of tokens that the text tower computes: all, or, if packed, those up to each text's end.

        Class tokens and the padding to a multiple are not counted.
        """
        if not self.packed or not tokens_BL.shape[1]:
            return tokens_BL.numel()
        return int(self.end.positions(tokens_BL).sum()) + len(tokens_BL)
