"""Many small values in two arrays.

A list of a hundred million strings is as many objects: their counts of references lie beside them, so each loader
process that reads one writes to its page and ends up with a copy of everything.
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
    """An immutable list of JSON values, encoded end to end. Each takes its JSON text and 8 bytes."""

    encoded: bytes
    bounds: NDArray[np.int64]  # value i lies between bounds i and i + 1

    @classmethod
    def of(cls, values: Iterable[T]) -> Packed[T]:
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
