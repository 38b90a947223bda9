"""Random crops of each sample as a pure function of (seed, sample, number of the crop), for stored embeddings."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from clipx.data.views import View


@dataclass(frozen=True, slots=True)
class Crops:
    """`count` crops of each sample, with the distribution of training crops."""

    count: int
    seed: int

    def load(self, view: View, index: int, encoded: bytes) -> tuple[Tensor, Tensor]:
        """Returns the rows of the crops of sample `index`, and their boxes, [V, 4] int32. Raises BadSample."""
        (rows,) = view.allocate(self.count)
        boxes = [view.load(encoded, random.Random(f"{self.seed}/{index}/{v}"), row) for v, row in enumerate(rows)]
        return rows.clone(), torch.tensor(boxes, dtype=torch.int32)  # cloned: `allocate` returns the same memory again
