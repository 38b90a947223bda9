"""Columns of the samples of each shard, from the Parquet file next to it or its json members; sorted sets of ids."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipx.data import parquet_file
from clipx.data.loader_process import this_process
from clipx.data.parquet_file import ANY, FIX, KEY, TEXT, Role, cells, check_type, encoded, open_parquet, plain, shown
from clipx.data.shards.index import JSON, key_digests, load_table
from clipx.data.shards.shard import Shard, index_shards
from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadSample
from clipx.errors import DataError
from clipx.storage.files import errors_as, file_info, is_local
from clipx.storage.local import cache_folder, open_own, write_atomically
from clipx.storage.remote import open_sequential

_REQUESTED = 512  # json members of a remote shard that are requested together
_THREADS = 16
_BATCH = 1 << 16  # rows of a table that are read together
_ROLES = {"key": KEY, "status": TEXT}  # of img2dataset's columns


@dataclass(slots=True)
class ShardSamples:
    """The shards of a selection, with the number of places in each. Those without a table are not indexed yet."""

    shards: list[Shard]
    sizes: Sequence[int]

    @property
    def urls(self) -> list[str]:
        return [shard.url for shard in self.shards]

    def ensure_keys(self) -> None:
        """Indexes the shards that have no index yet, with a progress bar."""
        missing = [k for k, shard in enumerate(self.shards) if not shard.table]
        for k, shard in zip(missing, index_shards([self.shards[k] for k in missing]), strict=True):
            self.shards[k] = shard

    def index(self, shard: int) -> Shard:
        """Returns a shard, indexed."""
        if not self.shards[shard].table:
            (self.shards[shard],) = index_shards([self.shards[shard]])
        return self.shards[shard]

    def rows(self, shard: int) -> NDArray[np.int64]:
        """Returns the row in the index of the shard's place, -1 for a place without a sample."""
        found = self.index(shard)
        rows = np.full(self.sizes[shard], -1, dtype=np.int64)
        places = found.places(self.sizes[shard])
        rows[places] = np.arange(len(places))
        return rows

    def keys(self, shard: int) -> Ids:
        """Returns the id of the key of each place, 0 without a sample."""
        rows = self.rows(shard)
        found = np.zeros(len(rows), dtype=ID)
        found[rows >= 0] = np.load(self.index(shard).keys, allow_pickle=False)[rows[rows >= 0]]
        return found


def take(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Returns the rows of a table, missing values at -1."""
    return table.take(pa.array(rows, mask=rows < 0))


def parquet(url: str, retry_s: float) -> pq.ParquetFile:
    """Opens a Parquet file. Failed requests are repeated, also while it is read. Raises DataError."""
    with errors_as(DataError, f"table {url} cannot be read", FIX):
        return open_parquet(open_retried(url, retry_s), f"table {url}")


def open_retried(url: str, retry_s: float) -> IO[bytes]:
    """Opens a file for sequential reading, whose failed requests are repeated. Raises the file system's errors."""
    return open_sequential(url, 0 if is_local(url) else int(file_info(url, retry_s)["size"]), retry_s)


def batches(url: str, columns: Mapping[str, Role], key: str, retry_s: float) -> Iterator[pa.RecordBatch]:
    """Yields some columns of a Parquet file. Raises DataError for one that is missing or of another type. `key`: the
    option of the file."""
    file = parquet(url, retry_s)
    check_columns(file.schema_arrow, columns, key, url)
    yield from parquet_file.batches(file, list(columns), f"table {url}", _BATCH)


def check_columns(schema: pa.Schema, wanted: Mapping[str, Role], key: str, url: str) -> None:
    """Raises DataError if a column is missing, or holds values of another type."""
    missing = [name for name in wanted if name not in schema.names]
    require_data(
        not missing,
        f"{key}: {url} has no column {', '.join(missing)}: it has {shown(schema.names)}; correct the name or the table",
    )
    for name, role in wanted.items():
        check_type(schema, name, role, url, f"{key}: column {name}", "name another column, or correct the table")


def require_data(ok: bool, message: str) -> None:
    if not ok:
        raise DataError(message)


# ------------------------------------------------------------------------------------ tables next to the shards


def sidecar(url: str) -> str:
    """Returns the Parquet file next to a shard, as img2dataset writes it."""
    return f"{url.removesuffix('.tar')}.parquet"


@dataclass(slots=True)
class SidecarTables:
    """The Parquet files next to the shards. Rows with a status other than success have no sample, as in img2dataset.
    Rows are found by the column key if the shard is indexed, else by their order, if they are as many as the samples.
    `option`: names the tables in errors. `table_of`: returns the table of a shard."""

    samples: ShardSamples
    columns: Sequence[str]
    option: str = "data.table=shards"
    role: Role = ANY
    table_of: Callable[[str], str] = sidecar
    without_sample: int = 0
    lock: Lock = field(default_factory=Lock)

    def read(self, shard: int) -> pa.Table:
        """Returns the columns of each place of a shard. Raises DataError if the file does not match the shard."""
        opened = self.samples.shards[shard]
        url = self.table_of(opened.url)
        file = parquet(url, opened.access.retry_s)
        schema = file.schema_arrow
        further = {name: role for name, role in _ROLES.items() if name in schema.names}
        for roles in (dict.fromkeys(self.columns, self.role), further):
            check_columns(schema, roles, self.option, url)
        wanted = list(dict.fromkeys([*self.columns, *further]))
        parts = list(parquet_file.batches(file, wanted, f"table {url}", _BATCH, use_threads=False))
        schema = pa.schema([(name, plain(schema.field(name).type)) for name in wanted])
        table = pa.Table.from_batches(parts, schema)
        if "status" in further:
            table = table.filter(pc.equal(encoded(table["status"]), b"success"))
        rows = self._rows(shard, table, url)
        unused = len(table) - int((rows >= 0).sum())
        with self.lock:
            self.without_sample += unused
        return take(table, rows)

    def _rows(self, shard: int, table: pa.Table, url: str) -> NDArray[np.int64]:
        """Returns the row of each place of a shard, -1 for none."""
        size = self.samples.sizes[shard]
        if not self.samples.shards[shard].table and len(table) == size:
            return np.arange(size)
        if "key" in table.column_names:
            ids = ids_of(table["key"].combine_chunks(), "key", url)
            order = np.lexsort((ids["f1"], ids["f0"]))
            found = IdSet(ids[order]).find(self.samples.keys(shard))
            require_data(
                bool((found >= 0).any()) or not size or not len(table),
                f"none of the {len(table):,} keys of {url} is in its shard: write the table of this shard",
            )
            return np.where(found >= 0, order[np.maximum(found, 0)], -1) if len(table) else found
        rows, index = self.samples.rows(shard), self.samples.index(shard)
        if len(table) == index.samples + len(index.skipped):  # a row for each sample, also for those that are not used
            rows = np.where(rows >= 0, index.places(len(table))[np.maximum(rows, 0)], -1)
        else:
            require_data(
                len(table) == index.samples,
                f"{url} has {len(table):,} rows, but its shard has {index.samples:,} samples: write it again, or "
                "with a column key",
            )
        return rows


# ----------------------------------------------------------------------------------------------- json members


@dataclass(slots=True)
class JsonTables:
    """Columns from the json members of the shards. A key that a sample does not have is a missing value."""

    samples: ShardSamples
    columns: Sequence[str]

    def prepare(self) -> None:
        """Reads the json members that are not in the cache, with a progress bar."""
        self.samples.ensure_keys()
        new = [(shard, path) for shard in self.samples.shards if not (path := self._path(shard)).is_file()]
        make = partial(_store_columns, columns=tuple(self.columns))
        run_in_pool(make, new, "reading json", threads=0 if all(shard.local for shard, _ in new) else _THREADS)

    def read(self, shard: int) -> pa.Table:
        """Returns the columns of each place of a shard."""
        table = pq.read_table(self._path(self.samples.index(shard)), use_threads=False, partitioning=None)
        return take(table, self.samples.rows(shard))

    def _path(self, shard: Shard) -> Path:
        digest = hashlib.sha256("\n".join(self.columns).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return cache_folder("columns") / f"{shard.version}-{digest}.parquet"


def _store_columns(item: tuple[Shard, Path], columns: tuple[str, ...]) -> None:
    shard, path = item
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for meta in _json_members(shard):
        for name in columns:
            values[name].append(meta.get(name))
    table = pa.table({name: _column(found) for name, found in values.items()})
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def _json_members(shard: Shard) -> Iterator[dict[str, Any]]:
    """Yields the json member of each sample of a shard, {} if it has none that can be read."""
    shard = replace(shard, access=replace(shard.access, whole=False, cache_bytes=0))
    spans = [(offset, size) for offset, size in load_table(shard.table)[:, JSON].tolist()]
    for start in range(0, len(spans), _REQUESTED):
        group = spans[start : start + _REQUESTED]
        this_process().request(f"json {shard.url}", [(shard, span) for span in group if span[1] > 0])
        for span in group:
            try:
                meta = json.loads(shard.fetch(span)) if span[1] > 0 else {}
            except (BadSample, ValueError, RecursionError):
                meta = {}
            yield meta if isinstance(meta, dict) else {}


def _column(values: Sequence[Any]) -> pa.Array:
    """Returns a column of true/false, of numbers, or of texts if the values are of several types."""
    types = {type(value) for value in values if value is not None}
    if not types:
        return pa.nulls(len(values))
    if types == {bool}:
        return pa.array(values, pa.bool_())
    if types <= {int, float, bool}:
        try:
            return pa.array(values, pa.float64() if float in types else pa.int64())
        except (OverflowError, pa.ArrowInvalid):
            return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [value if isinstance(value, str | None) else json.dumps(value) for value in values]
    clean = [None if text is None else text.encode("utf-8", "replace").decode() for text in texts]
    return pa.array(clean, pa.string())


# -------------------------------------------------------------------------------------------------- sets of ids


ID = np.dtype("<u8,<u8")
WEIGHTED = np.dtype([*ID.descr, ("weight", "<f8")])
Ids = NDArray[np.void]  # [n] of dtype ID or WEIGHTED

CHUNK = 1 << 20  # ids that are read together
_UID = r"^[0-9a-fA-F]{32}$"


def ids_of(values: pa.Array, by: str, where: str) -> Ids:
    """Returns the ids of keys or uids (`by`), texts or whole numbers. A missing one has the id 0. Raises DataError for
    an invalid uid."""
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
    """Writes ids, sorted and each once, with its first weight. Returns the number of repeated ids. Memory: a bucket,
    1/256 of the ids."""
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
    """A sorted set of `ids`, with or without weights, which counts those that were found. Memory: one bit for each
    id."""

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
