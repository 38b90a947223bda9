"""Sorted sets of ids of 128 bits in files that are mapped into memory.

The id of a key is a digest of its text: see `key_digests`. That of a uid, 32 hexadecimal digits as in DataComp, is the
number itself. So a DataComp subset, a sorted .npy of dtype u8,u8, is such a set. Others are sorted in buckets of a
bounded size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipx.data.parquet_file import KEY, cells, encoded
from clipx.data.shards.index import key_digests
from clipx.errors import DataError
from clipx.storage.local import open_own

ID = np.dtype("<u8,<u8")
WEIGHTED = np.dtype([*ID.descr, ("weight", "<f8")])
Ids = NDArray[np.void]
"""[n] of dtype ID or WEIGHTED."""

CHUNK = 1 << 20  # ids that are read together
_UID = r"^[0-9a-fA-F]{32}$"


def ids_of(values: pa.Array, by: str, where: str) -> Ids:
    """Returns the ids of keys or uids (`by`), texts or whole numbers. A missing one has the id 0.

    Raises DataError for an invalid uid.
    """
    if not KEY.fits(values.type):
        raise DataError(f"column {by} of {where} holds {values.type}, not texts: store each {by} as a text")
    texts = encoded(values)
    missing = texts.is_null().to_numpy(zero_copy_only=False)
    if by == "key":
        found = key_digests(cell or "" for cell in cells(texts)).copy()
    else:
        valid = pc.match_substring_regex(texts, _UID).fill_null(True)
        if not pc.all(valid).as_py() and len(texts):
            wrong = cells(texts.filter(pc.invert(valid)))[0]
            raise DataError(f"uid {str(wrong)[:80]!r} of {where} is not 32 hexadecimal digits: correct it")
        digits = b"".join(texts.fill_null(b"0" * 32).to_pylist()).decode()
        found = np.frombuffer(bytes.fromhex(digits), dtype=">u8,>u8").astype(ID)
    found[missing] = 0
    return found


def with_weights(ids: Ids, weights: NDArray[np.float64]) -> Ids:
    """Returns the ids with the weight of each one."""
    rows = np.empty(len(ids), dtype=WEIGHTED)
    rows["f0"], rows["f1"], rows["weight"] = ids["f0"], ids["f1"], weights
    return rows


def write_sorted(path: Path, chunks: Iterable[Ids]) -> int:
    """Writes ids, sorted and each once, with its first weight. Returns the number of repeated ids.

    Memory: a bucket, 1/256 of the ids.
    """
    repeated, dtype = 0, ID
    with TemporaryDirectory(dir=path.parent) as buckets, open_own(path, "wb") as out:
        for rows in chunks:
            dtype, bucket = rows.dtype, (rows["f0"] >> np.uint64(56)).astype(np.uint8)
            order = np.argsort(bucket, kind="stable")
            for part in np.split(rows[order], np.flatnonzero(np.diff(bucket[order])) + 1):
                if len(part):
                    with open_own(Path(buckets) / f"{int(part['f0'][0]) >> 56:03d}", "ab") as file:
                        part.tofile(file)
        for stored in sorted(Path(buckets).iterdir()):
            rows = np.fromfile(stored, dtype=dtype)
            rows = rows[np.lexsort((rows["f1"], rows["f0"]))]  # stable: the first of repeated ids stays first
            same = (rows["f0"][1:] == rows["f0"][:-1]) & (rows["f1"][1:] == rows["f1"][:-1])
            repeated += int(same.sum())
            rows[np.concatenate([[True], ~same])].tofile(out)
    return repeated


def _below(left: Ids, right: Ids) -> NDArray[np.bool_]:
    return (left["f0"] < right["f0"]) | ((left["f0"] == right["f0"]) & (left["f1"] < right["f1"]))  # type: ignore[no-any-return]


def is_sorted(ids: Ids) -> bool:
    """Returns whether each id is larger than the one before. Reads a part of a mapped file at a time."""
    parts = (ids[start : start + CHUNK + 1] for start in range(0, len(ids) - 1, CHUNK))
    return all(bool(_below(part[:-1], part[1:]).all()) for part in parts)


class IdSet:
    """A sorted set of `ids`, with or without weights, which counts those that were found.

    Memory: one bit for each id.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._found = np.zeros(-(-len(ids) // 8), dtype=np.uint8)
        self._lock = threading.Lock()

    def find(self, wanted: Ids) -> NDArray[np.int64]:
        """Returns the position of each wanted id in the set, -1 if it is not in it."""
        low, end = np.zeros(len(wanted), dtype=np.int64), np.full(len(wanted), len(self.ids), dtype=np.int64)
        if not len(self.ids):
            return low - 1
        for _ in range(len(self.ids).bit_length()):  # np.searchsorted would copy all ids
            middle = (low + end) // 2
            below = (low < end) & _below(self.ids[np.minimum(middle, len(self.ids) - 1)], wanted)
            low, end = np.where(below, middle + 1, low), np.where(below, end, np.maximum(low, middle))
        at = self.ids[np.minimum(low, len(self.ids) - 1)]
        equal = (low < len(self.ids)) & (at["f0"] == wanted["f0"]) & (at["f1"] == wanted["f1"])
        places = low[equal]
        with self._lock:
            np.bitwise_or.at(self._found, places >> 3, (1 << (places & 7)).astype(np.uint8))
        return np.where(equal, low, -1)

    @property
    def unknown(self) -> int:
        """Number of ids that were not found yet."""
        parts = (self._found[at : at + CHUNK] for at in range(0, len(self._found), CHUNK))
        return len(self.ids) - sum(int(np.unpackbits(part).sum()) for part in parts)
