"""Packers: token ids to the packed texts that a model takes, and images to the order of their patches, on the host,
where loader processes run them.

Shape suffixes: B batch, L length of a text, R rows of an image, X numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from clipx.model.packing import CLIP_END, Packing
from clipx.model.tokenizer import TextEnd

if TYPE_CHECKING:
    from clipx.model.image_packing import ImagePacking


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


@dataclass(frozen=True, slots=True)
class ImagePacker:
    """Packs images at their own aspect ratio. Pickled to loader processes."""

    prefix: int = 0
    """Number of class and register tokens of an image."""

    multiple: int = 1
    """Multiple to which the number of tokens is rounded, see Packing.rounded."""

    def __call__(self, grid_B2: Tensor, rows: int) -> ImagePacking:
        """Packs images by their grids. `rows`: R."""
        from clipx.model.image_packing import ImagePacking

        return ImagePacking.of(grid_B2, rows, self.prefix, self.multiple)
