"""Random crops of each sample as a pure function of (seed, sample, number of the crop), for stored embeddings.

The augmentation of a crop is a function of the same numbers, so it is not stored.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from clipx.data.views import View


@dataclass(frozen=True, slots=True)
class Crops:
    """`count` crops of each sample, with the distribution and the augmentation of training crops."""

    count: int
    seed: int

    def load(self, view: View, index: int, encoded: bytes) -> tuple[Tensor, Tensor]:
        """Returns the rows of the crops of sample `index`, and their boxes, [V, 4] int32. Raises BadSample."""
        (rows,) = view.allocate(self.count)
        boxes = [view.load(encoded, random.Random(f"{self.seed}/{index}/{v}"), row) for v, row in enumerate(rows)]
        for v, row in enumerate(rows):
            view.augment(crop_seed(self.seed, index, v), row)
        return rows.clone(), torch.tensor(boxes, dtype=torch.int32)  # cloned: `allocate` returns the same memory again


def crop_seed(seed: int, index: int, number: int) -> str:
    """Returns the seed of the augmentation of a crop of sample `index`."""
    return f"{seed}/{index}/{number}/augment"
