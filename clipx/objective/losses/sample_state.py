"""State of each sample of the training set, sharded over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.errors import ClipxError
from clipx.model.transfer import moved


class SampleTable(nn.Module):
    """A table [samples, columns] with one row per sample, at the sample's index in the data set; NaN until written.

    Each row is stored on one rank: rank k stores the rows [k·r, (k+1)·r), r = ⌈samples / ranks⌉, so that a table of 400
    million rows and two float32 columns takes 0.4 GB on each of 8 ranks. Any rank can read any row, at the cost of one
    all_gather of the batch's indices and one all_reduce of the batch's rows.

    `rows` is this rank's part. It is not in the state_dict: a checkpoint stores each rank's rows by their indices, so
    that a run can resume with another number of ranks.
    """

    def __init__(self, comm: Comm, samples: int, columns: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.comm, self.samples = comm, samples
        per_rank = -(-samples // comm.world)
        self.start = min(comm.rank * per_rank, samples)
        self.stop = min(self.start + per_rank, samples)
        # One more row than the part takes the writes of other ranks' rows, so that no shape depends on the data.
        shape = (self.stop - self.start + 1, columns)
        self.storage: Tensor
        self.register_buffer("storage", torch.full(shape, torch.nan, device=device), persistent=False)

    @property
    def rows(self) -> Tensor:
        """A view of this rank's rows, [stop - start, columns]."""
        return self.storage[:-1]

    def read(self, index_b: Tensor) -> Tensor:
        """Returns the rows of this rank's samples, [b, columns]. Collective. Raises ClipxError for an index out of
        range."""
        return self.take(self.numbers(index_b))

    def take(self, index_B: Tensor) -> Tensor:
        """Returns the rows of this rank's share of a global batch, [b, columns]. Collective."""
        b = len(index_B) // self.comm.world
        return self.comm.sum(self._owned(index_B))[self.comm.rank * b : (self.comm.rank + 1) * b]

    def numbers(self, index_b: Tensor) -> Tensor:
        """Returns the sample indices of the global batch, [B], on the table's device. Collective. Raises ClipxError for
        an index out of range."""
        low, high = int(index_b.min()), int(index_b.max())  # cheap: the indices are on the host
        if low < 0 or high >= self.samples:
            raise ClipxError(
                f"the sample index {low if low < 0 else high} is out of the data set's range [0, {self.samples}): "
                "the data source must return each sample's position in the data set"
            )
        return self.comm.gather(moved(index_b, self.storage.device))

    def _owned(self, index_B: Tensor) -> Tensor:
        """Returns the batch's rows that this rank stores, and zeros for the others; a sum with zeros preserves NaN."""
        own_B = self._is_own(index_B)
        rows_BC = self.storage[torch.where(own_B, index_B - self.start, 0)]
        return torch.where(own_B[:, None], rows_BC, 0)

    def write(self, index_B: Tensor, rows_BC: Tensor, found_inf: Tensor | None = None) -> None:
        """Stores the rows of the global batch, unless `found_inf` is 1. For a sample that occurs twice, the last row is
        stored."""
        keep_B = self._is_own(index_B) & ~repeated_later(index_B)
        if found_inf is not None:
            keep_B &= found_inf == 0
        self.storage[torch.where(keep_B, index_B - self.start, len(self.storage) - 1)] = rows_BC.to(self.storage.dtype)

    def _is_own(self, index_B: Tensor) -> Tensor:
        return (index_B >= self.start) & (index_B < self.stop)


def repeated_later(index_B: Tensor) -> Tensor:
    """Returns whether each index occurs again later in the batch, [B]."""
    ordered, order = index_B.sort(stable=True)
    again = torch.zeros_like(index_B, dtype=torch.bool)
    again[order[:-1]] = ordered[:-1] == ordered[1:]
    return again
