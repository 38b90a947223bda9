"""Files of ids and weights: .npy, .parquet and .txt, read in parts and stored as arrays in a temporary folder."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipx.data.npy import map_array
from clipx.data.parquet_file import ANY, INDEX, KEY, NUMBER, numbers, shown, whole_numbers
from clipx.data.selection.expression import Predicate
from clipx.data.selection.tables import (
    CHUNK,
    ID,
    WEIGHTED,
    Ids,
    IdSet,
    batches,
    check_columns,
    ids_of,
    is_sorted,
    open_retried,
    parquet,
    require_data,
    with_weights,
    write_sorted,
)
from clipx.errors import ConfigError, DataError, require
from clipx.storage.files import errors_as, file_info, is_local, local_path, open_lines
from clipx.storage.local import open_own

INDEXED = b"clipx.score"
"""Key of the metadata of a Parquet file whose column `index` numbers the samples of the data. Elsewhere, as in files of
pandas, a column of that name can number the rows of the file."""

_VERSIONS = ("mtime", "ETag", "etag", "LastModified", "last_modified")
_FIX = "check the path"
_IDS = {"index": INDEX, "key": KEY, "uid": KEY}

WeightedIds = tuple[NDArray[Any], NDArray[np.float64] | None]  # (indices or ids, weight of each one or None)


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings of all files: the number of samples, retries, and a folder for temporary files."""

    total: int
    retry_s: float
    folder: Path


@dataclass(slots=True)
class Named:
    """Samples that a file names, by their place in the data, or by their key or uid (`by`). `values`, by place: of all
    samples in their order, whether each is named, or its weight, NaN without one."""

    by: str
    values: NDArray[Any] | None = None
    ids: IdSet | None = None
    given: int = 0
    unknown_indices: int = 0
    repeated: int = 0

    def of(self, start: int, size: int, ids_by: Callable[[str], Ids]) -> NDArray[Any]:
        """Returns whether each of `size` samples from `start` is named, or its weight, NaN without one."""
        if self.ids is None:
            assert self.values is not None
            return self.values[start : start + size]
        at = self.ids.find(ids_by(self.by))
        if self.ids.ids.dtype == ID:
            return at >= 0
        return np.where(at >= 0, self.ids.ids["weight"][np.maximum(at, 0)], np.nan)

    def notes(self) -> list[str]:
        """Returns the numbers of ids that were not found in the data, or that are repeated."""
        plural = "indices" if self.by == "index" else f"{self.by}s"
        unknown = self.unknown_indices if self.ids is None else self.ids.unknown
        notes = [f"{unknown:,} of {self.given:,} {plural} are not in the data"] if unknown else []
        return [*notes, *([f"{self.repeated:,} {plural} are repeated"] if self.repeated else [])]


def version(url: str, retry_s: float, key: str) -> str:
    """Returns the size and time of a file. Raises ConfigError if it cannot be found. `key`: option of the file."""
    with errors_as(ConfigError, f"{key}={url} cannot be read", _FIX):
        info = file_info(url, retry_s)
    require(info["type"] != "directory", f"{key}={url} is a folder: give a file")
    return f"{Path(url).resolve() if is_local(url) else url} {info['size']} {[info[k] for k in _VERSIONS if k in info]}"


def read_ids(path: str, key: str, reading: Reading) -> Named:
    """Reads a file of ids. Raises ConfigError or DataError."""
    suffix = Path(path).suffix.lower()
    if suffix == ".npy":
        return _npy_ids(path, key, reading)
    if suffix == ".txt":
        return _text_ids(path, key, reading)
    by, parts = _read_tables([path], key, ("index", "key", "uid"), reading)
    if by is None:
        names = parquet(path, reading.retry_s).schema_arrow.names
        raise ConfigError(f"{key}={path} has the columns {shown(names)}: name one of them index, key or uid")
    return _store(by, parts, key, path, reading)


def read_condition(condition: Predicate, urls: Sequence[str], reading: Reading) -> Named:
    """Returns the samples whose row of a table satisfies the condition."""
    schema = parquet(urls[0], reading.retry_s).schema_arrow
    check_columns(schema, dict.fromkeys(condition.columns, ANY), "data.table", urls[0])
    ids = ("index",) if INDEXED in (schema.metadata or {}) else ("key", "uid")
    by, parts = _read_tables(urls, "data.table", ids, reading, condition)
    return _store(by or "index", parts, "data.where", condition.text, reading)


def read_weights(path: str, key: str, reading: Reading) -> Named:
    """Reads a file of weights: a .npy of one number per sample, or a .parquet with the column weight."""
    if Path(path).suffix.lower() == ".npy":
        array = _npy(path, key)
        require(array.dtype.kind in "fiu", f"{key}={path} holds {array.dtype}: give one number per sample")
        _check_rows(len(array), reading.total, key, [path])
        for start in range(0, len(array), CHUNK):
            _checked(array[start : start + CHUNK], f"{key}={path}")
        return Named("index", array)
    by, parts = _read_tables([path], key, ("key", "uid", "index"), reading, weighted=True)
    found = _store(by or "index", parts, key, path, reading, weighted=True)
    require_data(
        found.by != "index" or not found.notes(),
        f"{key}={path}: {'; '.join(found.notes())}: give each sample of this data one weight",
    )
    return found


def _npy(path: str, key: str) -> NDArray[Any]:
    require(is_local(path), f"{key}={path} is remote, and is mapped into memory: copy it to a local disk")
    array = map_array(local_path(path), f"{key}={path}", "write it by numpy.save", ConfigError)
    require(array.ndim == 1 and len(array) > 0, f"{key}={path} has the shape {array.shape}: give one row of numbers")
    return array


def _npy_ids(path: str, key: str, reading: Reading) -> Named:
    array, by = _npy(path, key), "index"
    if array.dtype == bool:
        _check_rows(len(array), reading.total, key, [path])
        return Named(by, array)
    if array.dtype.names is not None and [array.dtype[name] for name in array.dtype.names] == [np.dtype("u8")] * 2:
        array, by = array.view(ID), "uid"
        if is_sorted(array):
            return Named(by, ids=IdSet(array), given=len(array))
    require(
        by == "uid" or array.dtype.kind in "iu",
        f"{key}={path} holds {array.dtype}: give integers (indices), true and false for each sample, or u8,u8 (uids, "
        "as DataComp)",
    )
    parts = ((array[at : at + CHUNK], None) for at in range(0, len(array), CHUNK))
    return _store(by, parts, key, path, reading)


def _text_ids(path: str, key: str, reading: Reading) -> Named:
    """Reads a key or uid from each line. They are uids if the first one has 32 hexadecimal digits."""
    with errors_as(ConfigError, f"{key}={path} cannot be read", _FIX):
        raw: Any = open_retried(path, reading.retry_s)
        opened = io.BufferedReader(raw)  # fsspec's files would copy 5 MiB for each line
    with open_lines(opened) as file:
        try:
            lines = filter(None, map(str.strip, file))
            first = list(islice(lines, 1))
            by = "uid" if re.fullmatch("[0-9a-fA-F]{32}", "".join(first)) else "key"
            ids = chain(first, lines)
            chunks = iter(lambda: list(islice(ids, CHUNK)), [])
            parts = ((ids_of(pa.array(chunk), by, path), None) for chunk in chunks)
            return _store(by, parts, key, path, reading)
        except UnicodeError:
            raise DataError(f"{key}={path} is not UTF-8: save it as UTF-8, with one key or uid per line") from None


def _read_tables(
    urls: Sequence[str],
    key: str,
    ids: Sequence[str],
    reading: Reading,
    condition: Predicate | None = None,
    weighted: bool = False,
) -> tuple[str | None, Iterator[WeightedIds]]:
    """Returns the first column of `ids` that a table has, and the ids of the rows that satisfy the condition. Raises
    DataError."""
    names = parquet(urls[0], reading.retry_s).schema_arrow.names
    by = next((name for name in ids if name in names), None)
    columns = dict.fromkeys(condition.columns if condition else (), ANY)
    columns |= {"weight": NUMBER} if weighted else {}
    columns |= {by: _IDS[by]} if by else {}

    def parts() -> Iterator[WeightedIds]:
        rows = 0
        for url in urls:
            for batch in batches(url, columns, key, reading.retry_s):
                named: NDArray[Any] = np.arange(rows, rows + len(batch))
                rows += len(batch)
                if condition is not None:
                    chosen = condition.selects(pa.Table.from_batches([batch]))
                    batch, named = batch.filter(pa.array(chosen)), named[chosen]
                if by is not None:
                    named = whole_numbers(batch[by]) if by == "index" else ids_of(batch[by], by, url)
                yield named, _checked(numbers(batch["weight"]), f"{key}={url}") if weighted else None
        if by is None:
            _check_rows(rows, reading.total, key, urls)

    return by, parts()


def _store(
    by: str, parts: Iterable[WeightedIds], key: str, place: str, reading: Reading, weighted: bool = False
) -> Named:
    """Stores ids or indices, with their weights, in a temporary file. Raises ConfigError or DataError."""
    path, total, given, known = reading.folder / key, reading.total, 0, 0
    if by != "index":
        rows = (named if weights is None else with_weights(named, weights) for named, weights in parts)
        repeated = write_sorted(path, rows)
        require(path.stat().st_size > 0, f"{key}={place} names no sample")
        ids = np.memmap(path, WEIGHTED if weighted else ID, "r").view(np.ndarray)
        return Named(by, ids=IdSet(ids), given=len(ids), repeated=repeated)
    kind = np.dtype(np.float64 if weighted else np.bool_)
    with open_own(path, "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, total * kind.itemsize)  # a full disk would end the process by SIGBUS
        values = np.memmap(file, kind, "r+", shape=(total,)).view(np.ndarray)
    if weighted:
        values.fill(np.nan)
    for indices, weights in parts:
        inside = (indices >= 0) & (indices < total)
        values[indices[inside].astype(np.int64)] = True if weights is None else weights[inside]
        given, known = given + len(indices), known + int(np.count_nonzero(inside))
    require(given > 0, f"{key}={place} names no sample")
    chunks = (values[at : at + CHUNK] for at in range(0, total, CHUNK))
    named = sum(int(np.count_nonzero(np.isfinite(chunk) if weighted else chunk)) for chunk in chunks)
    return Named(by, values, given=given, unknown_indices=given - known, repeated=known - named)


def _check_rows(rows: int, total: int, key: str, urls: Sequence[str]) -> None:
    require_data(
        rows == total,
        f"{key}={urls[0]} has {rows:,} rows{f' in {len(urls):,} files' if len(urls) > 1 else ''}, but the data has "
        f"{total:,} samples: give one row for each sample in their order, or a column key or uid",
    )


def _checked(weights: NDArray[Any], named: str) -> NDArray[Any]:
    """Returns the weights. Raises DataError for one that is missing, negative or not finite."""
    wrong = weights[~((weights >= 0) & np.isfinite(weights))]
    if len(wrong):
        raise DataError(f"{named} has the weight {wrong[0]}: give finite numbers from 0")
    return weights
