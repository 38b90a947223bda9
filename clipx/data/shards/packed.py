"""Many small values in two arrays.

A list of a hundred million strings is as many objects: their counts of references lie beside them, so each loader
process that reads one writes to its page and ends up with a copy of everything.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Packed(Sequence[T]):
    """A list of values of JSON (text, numbers, null, lists of them), as JSON laid end to end. 8 bytes each beside that.

    A slice is a copy, so that what is sent to another process is no more than it says.
    """

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

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            bounds = self.bounds[start : max(start, stop) + 1]
            return Packed(self.encoded[bounds[0] : bounds[-1]], bounds - bounds[0])
        place = range(len(self))[index]
        text = self.encoded[self.bounds[place] : self.bounds[place + 1]].decode("utf-8", "surrogatepass")
        value: T = json.loads(text)
        return value
