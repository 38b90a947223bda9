"""Files of ids and weights: .npy, .parquet and .txt, read in parts and stored in the cache as sorted arrays."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipx.data.npy import map_array
from clipx.data.parquet_file import ANY, INDEX, KEY, NUMBER, numbers, shown, whole_numbers
from clipx.data.selection.expression import Condition
from clipx.data.selection.ids import HEADER_BYTES, ID, Ids, IdSet, count_bits, ids_of, is_sorted, write_sorted
from clipx.data.selection.tables import batches, check_columns, open_retried, parquet, require_data
from clipx.errors import ConfigError, DataError, require
from clipx.storage.files import errors_as, file_info, is_local, local_path
from clipx.storage.local import open_own
from clipx.storage.text_file import open_lines

Indices = NDArray[np.int64]
Values = NDArray[np.float64]

INDEXED = b"clipx.score"
"""Key of the metadata of a Parquet file whose column `index` numbers the samples of the data. Elsewhere, as in files of
pandas, a column of that name can number the rows of the file."""

_CHUNK = 1 << 20
_VERSIONS = ("mtime", "ETag", "etag", "LastModified", "last_modified")
_FIX = "check the path"
_IDS = {"index": INDEX, "key": KEY, "uid": KEY}


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings of all files: the number of samples, retries, and a folder for temporary files."""

    total: int
    retry_s: float
    folder: Path


@dataclass(slots=True)
class Ordered:
    """Samples by their place in the data: a bit or a value for each sample.

    With values and bits, the bits are of the samples that have a value. The bits of a list of `given` indices:
    `unknown` of these are not in the data, `repeated` were there before.
    """

    bits: NDArray[np.uint8] | None = None
    values: NDArray[Any] | None = None
    given: int = 0
    unknown: int = 0
    repeated: int = 0

    def mask(self, start: int, size: int) -> NDArray[np.bool_]:
        """Returns whether each of `size` samples from `start` is selected."""
        assert self.bits is not None
        part = np.unpackbits(self.bits[start >> 3 : (start + size + 7) >> 3])
        return part[start & 7 : (start & 7) + size].astype(bool)


@dataclass(slots=True)
class ById:
    """Samples by their key or uid (`by`), with `values` of the ids if these are weights."""

    by: str
    ids: IdSet
    repeated: int = 0


def version(url: str, retry_s: float, key: str) -> str:
    """Returns the size and time of a file. Raises ConfigError if it cannot be found. `key`: option of the file."""
    with errors_as(ConfigError, f"{key}={url} cannot be read", _FIX):
        info = file_info(url, retry_s)
    require(info["type"] != "directory", f"{key}={url} is a folder: give a file")
    return f"{Path(url).resolve() if is_local(url) else url} {info['size']} {[info[k] for k in _VERSIONS if k in info]}"


def read_ids(path: str, key: str, reading: Reading) -> Ordered | ById:
    """Reads a file of ids. Raises ConfigError or DataError."""
    suffix = Path(path).suffix.lower()
    if suffix == ".npy":
        return _npy_ids(path, key, reading)
    if suffix == ".txt":
        return _text_ids(path, key, reading)
    require(suffix == ".parquet", f"{key}={path} must end with .npy, .parquet or .txt")
    names = parquet(path, reading.retry_s).schema_arrow.names
    by = next((name for name in ("index", "key", "uid") if name in names), None)
    require(by is not None, f"{key}={path} has the columns {shown(names)}: name one of them index, key or uid")
    assert by is not None
    columns = (batch.column(0) for batch in batches(path, {by: _IDS[by]}, key, reading.retry_s))
    if by == "index":
        return _by_index((whole_numbers(column) for column in columns), path, key, reading)
    return _by_id(by, ((ids_of(column, by, path), None) for column in columns), path, key, reading)


def _npy(path: str, key: str) -> NDArray[Any]:
    require(is_local(path), f"{key}={path} is remote, and is mapped into memory: copy it to a local disk")
    array = map_array(local_path(path), f"{key}={path}", "write it by numpy.save", ConfigError)
    require(array.ndim == 1 and len(array) > 0, f"{key}={path} has the shape {array.shape}: give one row of numbers")
    return array


def _npy_ids(path: str, key: str, reading: Reading) -> Ordered | ById:
    array = _npy(path, key)
    parts = (array[at : at + _CHUNK] for at in range(0, len(array), _CHUNK))
    if array.dtype.names is not None and [array.dtype[name] for name in array.dtype.names] == [np.dtype("u8")] * 2:
        if is_sorted(ids := array.view(ID)):
            return ById("uid", IdSet(ids))
        return _by_id("uid", ((part.view(ID), None) for part in parts), path, key, reading)
    if array.dtype == bool:
        _check_rows(len(array), reading.total, key, [path])
        return Ordered(bits=np.packbits(array))
    return _by_index(parts, path, key, reading)


def _by_index(parts: Iterable[NDArray[Any]], path: str, key: str, reading: Reading) -> Ordered:
    """Sets the bits of indices in any order."""
    bits, given, known = _no_bits(reading.total), 0, 0
    for part in parts:
        require(
            part.dtype.kind in "iu",
            f"{key}={path} holds {part.dtype}: give integers (indices), true and false for each sample, or u8,u8 "
            "(uids, as DataComp)",
        )
        indices = part[(part >= 0) & (part < reading.total)].astype(np.int64)
        _set_bits(bits, indices)
        given, known = given + len(part), known + len(indices)
    require(given > 0, f"{key}={path} is empty")
    return Ordered(bits=bits, given=given, unknown=given - known, repeated=known - count_bits(bits))


def _no_bits(total: int) -> NDArray[np.uint8]:
    return np.zeros(-(-total // 8), dtype=np.uint8)


def _set_bits(bits: NDArray[np.uint8], indices: Indices) -> None:
    """Sets bits in the order of np.packbits."""
    np.bitwise_or.at(bits, indices >> 3, (128 >> (indices & 7)).astype(np.uint8))


def _text_ids(path: str, key: str, reading: Reading) -> ById:
    """Reads a key or uid from each line. They are uids if the first one has 32 hexadecimal digits."""
    with errors_as(ConfigError, f"{key}={path} cannot be read", _FIX):
        raw: Any = open_retried(path, reading.retry_s)
        opened = io.BufferedReader(raw)  # fsspec's files would copy 5 MiB for each line
    with open_lines(opened) as file:
        try:
            lines = (line for line in map(str.strip, file) if line)
            first = next(lines, "")
            require(bool(first), f"{key}={path} is empty")
            by = "uid" if re.fullmatch("[0-9a-fA-F]{32}", first) else "key"
            chunks = _chunks([first], lines)
            return _by_id(by, ((ids_of(pa.array(chunk), by, path), None) for chunk in chunks), path, key, reading)
        except UnicodeError:
            raise DataError(f"{key}={path} is not UTF-8: save it as UTF-8, with one key or uid per line") from None


def _chunks(first: list[str], lines: Iterator[str]) -> Iterator[list[str]]:
    while chunk := [*first, *islice(lines, _CHUNK)]:
        yield chunk
        first = []


def _by_id(by: str, chunks: Iterable[tuple[Ids, Values | None]], identity: str, key: str, reading: Reading) -> ById:
    """Sorts ids into a temporary file."""
    path = reading.folder / f"{key}.ids"
    repeated = write_sorted(str(path), chunks)
    require(path.stat().st_size > HEADER_BYTES, f"{key} selects nothing: {identity}")
    return ById(by, IdSet.open(str(path)), repeated)


def read_condition(condition: Condition, urls: Sequence[str], reading: Reading) -> Ordered | ById:
    """Returns the samples whose row of a table satisfies the condition.

    The column `index` finds the samples of a table of clipx.score, a column `key` or `uid` those of another table.
    Without one, the rows of all files together must be the samples in their order.
    """
    key, total = "data.table", reading.total
    schema = parquet(urls[0], reading.retry_s).schema_arrow
    check_columns(schema, dict.fromkeys(condition.columns, ANY), key, urls[0])
    ids = ("index",) if INDEXED in (schema.metadata or {}) else ("key", "uid")
    by = next((name for name in ids if name in schema.names), None)
    columns = {**dict.fromkeys(condition.columns, ANY), **({by: _IDS[by]} if by else {})}
    parts = (pa.Table.from_batches([b]) for url in urls for b in batches(url, columns, key, reading.retry_s))
    if by == "index":
        found = (whole_numbers(t["index"].combine_chunks())[condition.selects(t)] for t in parts)
        return _by_index(found, urls[0], key, reading)
    if by is not None:
        kept = (t[by].combine_chunks().filter(pa.array(condition.selects(t))) for t in parts)
        chunks = ((ids_of(texts, by, urls[0]), None) for texts in kept)
        return _by_id(by, chunks, f"{urls[0]} {condition.text}", key, reading)
    bits, start = _no_bits(total), 0
    for table in parts:
        if start + len(table) <= total:
            _set_bits(bits, start + np.flatnonzero(condition.selects(table)))
        start += len(table)
    _check_rows(start, total, key, urls)
    return Ordered(bits=bits)


def _check_rows(rows: int, total: int, key: str, urls: Sequence[str]) -> None:
    require_data(
        rows == total,
        f"{key}={urls[0]} has {rows:,} rows{f' in {len(urls):,} files' if len(urls) > 1 else ''}, but the data has "
        f"{total:,} samples: give one row for each sample in their order, or a column key or uid",
    )


def read_weights(path: str, key: str, reading: Reading) -> Ordered | ById:
    """Reads a file of weights: a .npy of one number per sample, or a .parquet with the column weight."""
    suffix = Path(path).suffix.lower()
    if suffix == ".npy":
        array = _npy(path, key)
        require(array.dtype.kind in "fiu", f"{key}={path} holds {array.dtype}: give one number per sample")
        _check_rows(len(array), reading.total, key, [path])
        return Ordered(values=array)
    require(suffix == ".parquet", f"{key}={path} must end with .npy or .parquet")
    names = parquet(path, reading.retry_s).schema_arrow.names
    by = next((name for name in ("key", "uid", "index") if name in names), None)
    parts = batches(path, {"weight": NUMBER, **({by: _IDS[by]} if by else {})}, key, reading.retry_s)
    weights = ((batch, numbers(batch.column(0))) for batch in parts)
    if by == "index":
        by_index = ((whole_numbers(batch.column(1)), found) for batch, found in weights)
        return _weights_by_index(by_index, path, key, reading)
    if by is not None:
        chunks = ((ids_of(batch.column(1), by, path), found) for batch, found in weights)
        return _by_id(by, chunks, path, key, reading)
    stored, rows = reading.folder / f"{key}.values", 0
    with open_own(stored, "wb") as file:
        for _, found in weights:
            found.tofile(file)
            rows += len(found)
    _check_rows(rows, reading.total, key, [path])
    return Ordered(values=np.memmap(stored, dtype=np.float64, mode="r").view(np.ndarray))


def _weights_by_index(chunks: Iterable[tuple[Indices, Values]], path: str, key: str, reading: Reading) -> Ordered:
    """Writes the values of some of the samples into a temporary file. Raises DataError."""
    total, rows = reading.total, 0
    bits = _no_bits(total)
    values = np.memmap(reading.folder / f"{key}.values", dtype=np.float64, mode="w+", shape=(total,))
    for indices, chunk in chunks:
        if len(wrong := indices[(indices < 0) | (indices >= total)]):
            raise DataError(
                f"{key}={path} has the index {wrong[0]}, but the data has {total:,} samples: write the file of "
                "this data"
            )
        values[indices] = chunk
        _set_bits(bits, indices)
        rows += len(indices)
    require_data(count_bits(bits) == rows, f"{key}={path} repeats an index: give each sample one weight")
    return Ordered(bits=bits, values=values.view(np.ndarray))
