"""Sources over some of the samples of a source, by indices and weights that are mapped into memory from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipx.data.source import BadRecord, Source, WrappedSource


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """An array of `count` numbers in a file, which is mapped into memory and shared by all processes of a machine."""

    path: str
    dtype: str
    count: int

    def load(self) -> NDArray[Any]:
        return _map(self.path, self.dtype, self.count)


@lru_cache(maxsize=64)
def _map(path: str, dtype: str, count: int) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)


@dataclass(frozen=True, slots=True)
class Selected(WrappedSource):
    """The samples of a source at sorted `indices`. A shard has the number of its selected samples, which may be 0.

    `digest`: of the indices and weights. `cumulative`: running sums of the samples' weights, with which they are drawn,
    or None.
    """

    indices: ArrayFile
    digest: str
    cumulative: ArrayFile | None = None
    _sizes: Sequence[int] = field(default=(), repr=False)

    @classmethod
    def of(cls, source: Source, indices: ArrayFile, digest: str, cumulative: ArrayFile | None = None) -> Selected:
        # Of another type, numpy would convert a copy of all indices.
        ends = np.cumsum(np.asarray(source.sizes, dtype=np.int64)).astype(indices.dtype)
        bounds = np.searchsorted(indices.load(), ends)
        return cls(source, indices, digest, cumulative, np.diff(bounds, prepend=0).tolist())

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def bad(self) -> Sequence[BadRecord]:
        return ()  # what is unusable is not selected

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}-selected-{self.digest}"

    def cumulative_weights(self) -> NDArray[np.float64] | None:
        return None if self.cumulative is None else self.cumulative.load()

    def source_index(self, index: int) -> int:
        return int(self.indices.load()[index])
