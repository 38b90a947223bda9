"""Sorted sets of ids of 128 bits in files that are mapped into memory.

The id of a key is a digest of its text: see `key_digests`. That of a uid, 32 hexadecimal digits as in DataComp, is the
number itself. So a DataComp subset, a sorted .npy of dtype u8,u8, is such a file. Others are sorted in buckets of a
bounded size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipx.data.parquet_file import KEY, cells, encoded
from clipx.data.shards.index import key_digests
from clipx.errors import DataError
from clipx.storage.local import open_own

ID = np.dtype("<u8,<u8")
Ids = NDArray[np.void]
"""[n] of dtype ID."""

HEADER_BYTES = 128  # of a .npy file of ids
_CHUNK = 1 << 20  # ids that are read or sorted together
_BUCKETS = 256
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


def write_sorted(path: str, chunks: Iterable[tuple[Ids, NDArray[np.float64] | None]]) -> int:
    """Writes ids, sorted and each once, to a .npy file. Returns the number of repeated ids.

    Values of the ids, if given, are written to `path`.values in the order of the ids: the first of a repeated id.
    Memory: a bucket, 1/256 of the ids.
    """
    folder = Path(path).parent
    written = repeated = 0
    with TemporaryDirectory(dir=folder) as buckets:
        files = [Path(buckets) / f"{k:03d}" for k in range(_BUCKETS)]
        row, values = ID, False
        for ids, value in chunks:
            values = value is not None
            row = np.dtype([("f0", "<u8"), ("f1", "<u8"), *([("value", "<f8")] if values else [])])
            rows = np.empty(len(ids), dtype=row)
            rows["f0"], rows["f1"] = ids["f0"], ids["f1"]
            if value is not None:
                rows["value"] = value
            bucket = (rows["f0"] >> np.uint64(56)).astype(np.uint8)
            order = np.argsort(bucket, kind="stable")
            for part in np.split(rows[order], np.flatnonzero(np.diff(bucket[order])) + 1):
                if len(part):
                    with open_own(files[int(part["f0"][0] >> np.uint64(56))], "ab") as file:
                        part.tofile(file)
        with open_own(Path(path), "wb") as out, open_own(Path(f"{path}.values"), "wb") as out_values:
            out.write(_header(0))
            for file_path in files:
                if not file_path.exists():
                    continue
                rows = np.fromfile(file_path, dtype=row)
                rows = rows[np.lexsort((rows["f1"], rows["f0"]))]  # stable: the first of repeated ids stays first
                same = (rows["f0"][1:] == rows["f0"][:-1]) & (rows["f1"][1:] == rows["f1"][:-1])
                rows = rows[np.concatenate([[True], ~same])]
                repeated += int(same.sum())
                written += len(rows)
                ids = np.empty(len(rows), dtype=ID)
                ids["f0"], ids["f1"] = rows["f0"], rows["f1"]
                ids.tofile(out)
                if values:
                    np.ascontiguousarray(rows["value"]).tofile(out_values)
            out.seek(0)
            out.write(_header(written))
    if not values:
        Path(f"{path}.values").unlink()
    return repeated


def _header(count: int) -> bytes:
    """Returns the 128 bytes of the header of a .npy file of ids, the same number for any count."""
    text = f"{{'descr': {ID.descr}, 'fortran_order': False, 'shape': ({count},), }}".ljust(HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def is_sorted(ids: Ids) -> bool:
    """Returns whether each id is larger than the one before. Reads a part of a mapped file at a time."""
    for start in range(0, len(ids) - 1, _CHUNK):
        part = ids[start : start + _CHUNK + 1]
        high, low = part["f0"], part["f1"]
        if not bool(np.all((high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1])))):
            return False
    return True


def count_bits(packed: NDArray[np.uint8]) -> int:
    """Returns the number of bits that are set, with the memory of a part of them."""
    return sum(int(np.unpackbits(packed[at : at + _CHUNK]).sum()) for at in range(0, len(packed), _CHUNK))


class IdSet:
    """A sorted set of ids in a file, which counts those that were found. Memory: one bit for each id.

    `values`: the value of each id, or None.
    """

    def __init__(self, ids: Ids, values: NDArray[np.float64] | None = None) -> None:
        self.ids, self.values = ids, values
        self._found = np.zeros(-(-len(ids) // 8), dtype=np.uint8)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str) -> IdSet:
        """Maps the file of `write_sorted` into memory."""
        ids: Ids = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        values = f"{path}.values"
        return cls(ids, np.memmap(values, dtype="<f8", mode="r").view(np.ndarray) if Path(values).exists() else None)

    def find(self, wanted: Ids) -> NDArray[np.int64]:
        """Returns the position of each wanted id in the set, -1 if it is not in it."""
        places = self._lower_bound(wanted["f0"].astype(np.uint64))
        found = np.full(len(wanted), -1, dtype=np.int64)
        active = np.arange(len(wanted))
        while len(active):  # ids with the same first half follow each other; there is nearly always one
            active = active[places[active] < len(self.ids)]
            at = self.ids[places[active]]
            active, at = active[same := at["f0"] == wanted["f0"][active]], at[same]
            equal = at["f1"] == wanted["f1"][active]
            found[active[equal]] = places[active[equal]]
            active = active[~equal]
            places[active] += 1
        marked = found[found >= 0]
        with self._lock:
            np.bitwise_or.at(self._found, marked >> 3, (1 << (marked & 7)).astype(np.uint8))
        return found

    @property
    def unknown(self) -> int:
        """Number of ids that were not found yet."""
        return len(self.ids) - count_bits(self._found)

    def _lower_bound(self, wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the first position whose first half is not below the wanted one.

        np.searchsorted would copy the first halves of all ids, which are not contiguous.
        """
        high: Any = self.ids["f0"]
        low, end = np.zeros(len(wanted), dtype=np.int64), np.full(len(wanted), len(high), dtype=np.int64)
        for _ in range(len(high).bit_length()):
            middle = (low + end) // 2
            below = (low < end) & (high[np.minimum(middle, len(high) - 1)] < wanted)
            low, end = np.where(below, middle + 1, low), np.where(below, end, np.maximum(low, middle))
        return low
