"""Immutable list of small values stored in two arrays, whose memory forked processes share.

A list of a hundred million strings consists of as many objects. Each object holds its reference count, so a loader
process that reads it writes to its memory page, and finally has a copy of the whole list.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Packed(Generic[T]):
    """An immutable list of JSON values. Each value takes the bytes of its JSON text and 8 more."""

    encoded: bytes
    """JSON texts of all values, concatenated."""

    bounds: NDArray[np.int64]
    """[values + 1]: value i is encoded[bounds[i]:bounds[i + 1]]."""

    @classmethod
    def of(cls, values: Iterable[T]) -> Packed[T]:
        """Packs values that JSON can represent."""
        import numpy as np

        encoded, ends = bytearray(), array("q", [0])
        text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        for value in values:
            encoded += text(value).encode("utf-8", "surrogatepass")
            ends.append(len(encoded))
        return cls(bytes(encoded), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[T]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> T:
        i = range(len(self))[index]
        text = self.encoded[self.bounds[i] : self.bounds[i + 1]].decode("utf-8", "surrogatepass")
        value: T = json.loads(text)
        return value
