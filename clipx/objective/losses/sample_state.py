"""State for each sample of the training set, spread over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clipx.distributed.comm import Comm
from clipx.errors import ClipxError


class SampleTable(nn.Module):
    """[samples, columns], a row for each sample by its number in the data set; NaN until first written.

    Each row has one owner: rank k keeps the rows [k·r, (k+1)·r), r = ⌈samples / ranks⌉, so that a table of 400 million
    rows and two float32 columns costs each of 8 ranks 0.4 GB. Any rank reads any rows, whoever keeps them, at the cost
    of one all_gather of the batch's numbers and one all_reduce of the batch's rows.

    `rows` is this rank's part. It is not in the state_dict: a checkpoint stores each rank's rows by their numbers, so
    that a run goes on with another number of ranks.
    """

    def __init__(self, comm: Comm, samples: int, columns: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.comm, self.samples = comm, samples
        per_rank = -(-samples // comm.world)
        self.start = min(comm.rank * per_rank, samples)
        self.stop = min(self.start + per_rank, samples)
        # One row more than the part: where writes of rows that another rank keeps go, so that no index depends on data.
        shape = (self.stop - self.start + 1, columns)
        self.storage: Tensor
        self.register_buffer("storage", torch.full(shape, torch.nan, device=device), persistent=False)

    @property
    def rows(self) -> Tensor:
        """[stop - start, columns], a view."""
        return self.storage[:-1]

    def read(self, index_b: Tensor) -> Tensor:
        """The rows of this rank's samples [b, columns]. Collective. Raises ClipxError for numbers out of range."""
        return self.take(self.numbers(index_b))

    def take(self, index_B: Tensor) -> Tensor:
        """The rows of this rank's share [b, columns] of a global batch. Collective."""
        b = len(index_B) // self.comm.world
        return self.comm.sum(self._owned(index_B))[self.comm.rank * b : (self.comm.rank + 1) * b]

    def numbers(self, index_b: Tensor) -> Tensor:
        """The sample numbers of the global batch [B], on the table's device. Collective."""
        low, high = int(index_b.min()), int(index_b.max())  # the numbers are on the host, where this costs nothing
        if low < 0 or high >= self.samples:
            raise ClipxError(
                f"sample number {low if low < 0 else high} is out of the data set's range [0, {self.samples}): the "
                "data source must give each sample its place in the data set"
            )
        return self.comm.gather(index_b.to(self.storage.device, non_blocking=True))

    def _owned(self, index_B: Tensor) -> Tensor:
        """The rows of the batch that this rank keeps, and zeros for the others; NaN passes through a sum with zeros."""
        own_B = self._is_own(index_B)
        rows_BC = self.storage[torch.where(own_B, index_B - self.start, 0)]
        return torch.where(own_B[:, None], rows_BC, 0)

    def write(self, index_B: Tensor, rows_BC: Tensor) -> None:
        """Stores the rows of the global batch, in batch order: of a sample that occurs twice the last one stays."""
        keep_B = self._is_own(index_B) & ~repeated_later(index_B)
        self.storage[torch.where(keep_B, index_B - self.start, len(self.storage) - 1)] = rows_BC.to(self.storage.dtype)

    def _is_own(self, index_B: Tensor) -> Tensor:
        return (index_B >= self.start) & (index_B < self.stop)


def repeated_later(index_B: Tensor) -> Tensor:
    """Whether the same number comes again later in the batch [B]."""
    ordered, order = index_B.sort(stable=True)
    again = torch.zeros_like(index_B, dtype=torch.bool)
    again[order[:-1]] = ordered[:-1] == ordered[1:]
    return again
