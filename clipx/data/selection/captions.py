"""Further captions of the samples of shards, such as synthetic ones, from Parquet files: one for each shard.

The needed columns are written once to the cache, in the order of the samples, as an Arrow file that is mapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa

from clipx.data.parquet_file import TEXTS, cells
from clipx.data.selection.tables import ShardSamples, SidecarTables, sidecar
from clipx.data.shards.index import MissingShard, file_version
from clipx.data.shards.shard import Shard
from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadRecord, usable_captions
from clipx.errors import DataError
from clipx.escape import print_stderr
from clipx.storage.files import is_local
from clipx.storage.local import cache_folder, write_atomically

_MAPPED = 256  # mapped files per process
_THREADS, _LOOKUPS = 16, 32  # remote files that are read, and looked up, concurrently
_DIGEST, _MISSING = b"digest", b"missing"  # metadata of a stored file: of its texts, and samples without a caption


@dataclass(frozen=True, slots=True)
class CaptionTables:
    """The tables of a set of shards. Pickled to loader processes."""

    place: str  # `shards`: next to each shard. Else the folder or URL that has them
    weights: dict[str, float]  # weight of each column
    prepared: bool = False  # True once `prepare` has read all tables and reported missing captions

    def captions(self, shard: Shard, size: int, place: int) -> list[tuple[float, Sequence[str]]]:
        """Returns (weight, captions) of each column that has captions for the sample at a place of a shard. `size`:
        number of places of the shard."""
        key = (self.place, tuple(self.weights), shard.table)
        if key not in _used:
            path = self._file(shard, size)
            if not path.is_file():
                self._store((path, shard, size))
            if not self.prepared and self.place not in _reported and (missing := _missing(path)):
                _reported.add(self.place)
                note = f"{shard.url}: {self._note(missing, size)}"
                print_stderr(f"{note}; further shards are not reported by this process")
            _used[key] = str(path)
        table = _map(_used[key])
        found = ((weight, usable_captions(table[column][place].as_py())[0]) for column, weight in self.weights.items())
        return [(weight, texts) for weight, texts in found if texts]

    def prepare(self, shards: Sequence[Shard]) -> tuple[CaptionTables, str, list[BadRecord]]:
        """Reads the tables that are not in the cache, with a progress bar. Returns the prepared tables, a digest of
        their texts, and a note if samples have no caption in them. Raises DataError."""
        urls, sizes = [shard.url for shard in shards], [shard.samples for shard in shards]
        with ThreadPoolExecutor(_LOOKUPS) as pool:
            paths = list(pool.map(self._file, shards, sizes))
        items = [item for item in zip(paths, shards, sizes, strict=True) if not item[0].is_file()]
        threads = 0 if all(map(is_local, map(self._table, urls))) else _THREADS
        run_in_pool(self._store, items, "reading captions", threads=threads)
        digest = hashlib.sha256()
        for path in paths:
            digest.update(_map(str(path)).schema.metadata[_DIGEST])
        missing = {url: count for url, count in zip(urls, map(_missing, paths), strict=True) if count}
        notes = [BadRecord(next(iter(missing)), self._note(sum(missing.values()), sum(sizes)))] if missing else []
        return replace(self, prepared=True), digest.hexdigest()[:16], notes

    def _note(self, missing: int, size: int) -> str:
        named = f"data.caption_table={self.place}"
        return f"{missing:,} of {size:,} samples have no caption in {named}, and their other captions are drawn"

    def _file(self, shard: Shard, size: int) -> Path:
        """Returns the path of the stored captions of a shard, which changes with the shard and its table."""
        table_url = self._table(shard.url)
        try:
            version, _ = file_version(table_url, (), shard.access.retry_s)
        except MissingShard:
            named = f"data.caption_table={self.place}"
            raise DataError(f"{named}: table {table_url} of {shard.url} does not exist: write it") from None
        columns = hashlib.sha256("\n".join(self.weights).encode("utf-8", "surrogatepass")).hexdigest()
        name = f"{shard.version}-{version[:16]}-{size}-{columns[:16]}.arrow"
        return cache_folder("captions") / name

    def _store(self, item: tuple[Path, Shard, int]) -> None:
        """Writes the captions of each place of a shard. Raises DataError."""
        path, shard, size = item
        option = f"data.caption_table={self.place}"
        samples, columns = ShardSamples([shard], [size]), list(self.weights)
        found = SidecarTables(samples, columns, option, TEXTS, self._table).read(0).select(columns)
        write_atomically(path, partial(_write, found))

    def _table(self, url: str) -> str:
        table = sidecar(url)
        return table if self.place == "shards" else f"{self.place.rstrip('/')}/{table.rpartition('/')[2]}"


_used: dict[tuple[str, tuple[str, ...], str], str] = {}  # files of the shards that this process has used
_reported: set[str] = set()


def _write(table: pa.Table, path: str) -> None:
    """Writes the usable captions of each row."""
    columns = [cells(column) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    usable = [[usable_captions(cell)[0] for cell in column] for column in columns]
    missing = sum(not any(row) for row in zip(*usable, strict=True))
    digest = hashlib.sha256(repr((table.column_names, rows)).encode("utf-8", "surrogatepass")).hexdigest()
    metadata = {_DIGEST: digest.encode(), _MISSING: str(missing).encode()}
    arrays = [pa.array(column, pa.list_(pa.string())) for column in usable]
    stored = pa.table(arrays, table.column_names, metadata=metadata)
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, stored.schema) as writer:
        writer.write_table(stored)


@lru_cache(maxsize=_MAPPED)
def _map(path: str) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(path)).read_all()


def _missing(path: Path) -> int:
    return int(_map(str(path)).schema.metadata[_MISSING])
