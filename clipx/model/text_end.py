"""The last token of a text in a row of the context. Imports no torch, for the specs.

Shape suffixes: B batch, L length of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Rule for the last token of a text: the first end token, or else the last that is not padding. Without both ids
    it is the last position of the context, so that padding counts as text."""

    end_id: int | None = None
    pad_id: int | None = None

    def positions(self, tokens_BL: Tensor) -> Tensor:
        """Returns the position of each text's last token, [B]."""
        if self.end_id is not None:
            return (tokens_BL == self.end_id).int().argmax(dim=1)  # argmax returns the first of equal values
        if self.pad_id is not None:
            return (tokens_BL != self.pad_id).sum(1).sub(1).clamp(min=0)
        return tokens_BL.new_full((len(tokens_BL),), tokens_BL.shape[1] - 1)
