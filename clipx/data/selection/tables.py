"""Columns of the samples of each shard: from the Parquet file next to it, or from its json members.

The json members of a shard are read once, and their columns are stored in the cache as a Parquet file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipx.data import parquet_file
from clipx.data.loader_process import this_process
from clipx.data.parquet_file import ANY, FIX, KEY, TEXT, Role, check_type, encoded, open_parquet, plain, shown
from clipx.data.selection.ids import ID, Ids, IdSet, ids_of
from clipx.data.shards.index import JSON, load_table
from clipx.data.shards.shard import Shard, index_shards
from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadSample
from clipx.errors import DataError
from clipx.storage.files import errors_as, file_info, is_local
from clipx.storage.local import cache_folder, write_atomically
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
    """Yields some columns of a Parquet file. Raises DataError for one that is missing or of another type.

    `key`: the option of the file.
    """
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
    `option`: names the tables in errors. `table_of`: returns the table of a shard.
    """

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
