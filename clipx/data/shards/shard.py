"""A shard: looked up, indexed, stored in the cache and read. Without an index it is prepared, under a lock, by the
first loader process of the machine that reads it."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from clipx.data.loader_process import this_process
from clipx.data.shards.cache import Access, discard, read_cached, store_in_background, store_now
from clipx.data.shards.index import (
    IMAGE,
    MissingShard,
    RowSpans,
    Span,
    UnreadableShard,
    file_version,
    key_digests,
    load_table,
)
from clipx.data.shards.tar import index_tar
from clipx.data.shards.write import run_in_pool
from clipx.data.source import BadRecord, BadSample
from clipx.errors import DataError
from clipx.storage.failure import error_text
from clipx.storage.files import is_local, local_path
from clipx.storage.local import cache_folder, write_atomically, write_text
from clipx.storage.remote import BLOCK, read_range
from clipx.storage.safe_json import parse_json, read_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Remote shards indexed concurrently: a reader mostly waits for the network. Up to this number, threads read them,
# because each process would first take a second to open its session. Above it, processes read them, because Python
# parses headers on one core only.
_REMOTE = 16
_GAP = 1 << 16  # bytes between the members of a sample up to which one request is cheaper than two


@dataclass(frozen=True, slots=True)
class Shard:
    """A tar file, with the facts that are known of it. Compared by place, version and settings."""

    url: str
    captions: tuple[int, ...]  # columns of captions: a usable sample has an image and a member in at least one of them
    access: Access
    size: int = 0  # size in bytes; 0 before it is looked up
    table: str = ""  # path of the table, whose name changes with the shard. Empty before it is looked up
    samples: int = field(default=0, compare=False)
    """Number of usable samples: the rows of the table. Like all that follows, it is known when the shard is indexed."""

    digest: str = field(default="", compare=False)  # digest of the names, offsets and sizes of the members
    bad: Sequence[BadRecord] = field(default=(), compare=False)
    notes: Sequence[BadRecord] = field(default=(), compare=False)
    """Remarks on the shard that are not about a skipped sample."""

    skipped: Sequence[int] = field(default=(), compare=False)
    """Numbers of the skipped samples among all samples of the shard, from 0."""

    @property
    def local(self) -> bool:
        return is_local(self.url)

    # ------------------------------------------------------------------------------------------------- index

    @property
    def version(self) -> str:
        """Name of the index, which changes with the shard."""
        return Path(self.table).stem

    @property
    def keys(self) -> str:
        """Path of the digests of the samples' names, [samples] (u8, u8): see `key_digests`."""
        return self._beside(".keys")

    @property
    def indexed(self) -> bool:
        """True if the index is in the cache."""
        return Path(self.table).is_file() and Path(self._beside(".json")).is_file()

    def _beside(self, ending: str) -> str:
        return self.table.removesuffix(".npy") + ending

    def find(self, patient: bool = False) -> Self:
        """Looks up the size and the version. Raises DataError, and MissingShard if the shard does not exist."""
        version, size = file_version(self.url, self.captions, self.access.retry_s, patient)
        return replace(self, size=size, table=str(cache_folder("index") / f"{version}.npy"))

    def load(self) -> Self:
        """Returns the shard with the content of its index."""
        meta = json.loads(Path(self._beside(".json")).read_text())
        for name in ("bad", "notes"):
            meta[name] = [BadRecord(*record) for record in meta[name]]
        return replace(self, **meta)

    def save(
        self,
        rows: Sequence[RowSpans],
        digest: str,
        bad: Sequence[BadRecord],
        notes: Sequence[BadRecord] = (),
        names: Sequence[str] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        """Writes the table, the digests of the names and the rest of the index. Raises DataError."""
        import numpy as np

        def save(path: str, array: NDArray[Any]) -> None:
            with Path(path).open("xb") as file:
                np.save(file, array, allow_pickle=False)

        write_atomically(Path(self.keys), partial(save, array=key_digests(names)))
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 4, 2)
        write_atomically(Path(self.table), partial(save, array=table))
        records = {name: [(one.key, one.reason) for one in found] for name, found in (("bad", bad), ("notes", notes))}
        meta = {"samples": len(rows), "digest": digest, "skipped": list(skipped), **records}
        write_text(Path(self._beside(".json")), json.dumps(meta))

    # ------------------------------------------------------------------------------------------------- first use

    def prepare(self, since: float, wait: bool) -> Self | None:
        """Returns the shard indexed, and stored if shards are read whole. A shard that does not exist has no samples.
        Returns None if another process is preparing it and `wait` is false. Raises DataError if the storage fails for
        `retry_s`. `since`: time from which on a shard that was looked up is not looked up again."""
        digest = hashlib.sha256(f"{self.url} {self.captions}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        record = cache_folder("index") / f"{digest}.found"
        try:
            with FileLock(record.with_suffix(".lock"), thread_local=False).acquire(blocking=wait):
                return self._prepare(since, record)
        except Timeout:
            return None

    def _prepare(self, since: float, record: Path) -> Self:
        try:
            shard = self if self.table else self._look_up(since, record)
            if shard.access.whole and shard.local:
                shard._advise(os.POSIX_FADV_WILLNEED)
            elif shard.access.whole and shard.cacheable:
                store_now(shard)
            if not shard.indexed:
                shard._index()
        except UnreadableShard as error:
            reason = "shard does not exist" if isinstance(error, MissingShard) else str(error)
            return replace(self, bad=[BadRecord(self.url, reason)])
        return shard.load()

    def _index(self) -> None:
        stored = not self.local and self.cacheable and self.cache_path.exists()
        index_tar(self, str(self.cache_path) if stored else None, cross_check=False)

    def _look_up(self, since: float, record: Path) -> Self:
        """Looks up the shard, once in a run of this machine."""
        with suppress(OSError, ValueError):
            table, size, found_at = parse_json(read_regular(record))
            if found_at >= since:
                return replace(self, table=table, size=size)
        shard = self.find(patient=True)
        write_text(record, json.dumps([shard.table, shard.size, time.time()]))
        return shard

    def release(self) -> None:
        """Ends the use of a shard that is read whole."""
        if self.access.whole and self.local:
            self._advise(os.POSIX_FADV_DONTNEED)
        elif self.access.whole and self.cacheable:
            discard(self)

    def _advise(self, advice: int) -> None:
        with suppress(OSError), Path(local_path(self.url)).open("rb", buffering=0) as file:  # reading reports the fault
            os.posix_fadvise(file.fileno(), 0, 0, advice)

    # ------------------------------------------------------------------------------------------------- cache

    @property
    def cacheable(self) -> bool:
        return self.size > 0 and (self.access.whole or self.size <= self.access.cache_bytes)

    @property
    def cache_path(self) -> Path:
        """Path of the cached file, which need not exist."""
        return self.access.folder / f"{self.version}.tar"

    def write(self, out: IO[bytes]) -> None:
        """Writes the content of the cached file. Raises DataError, or OSError if `out` cannot be written."""
        for start in range(0, self.size, BLOCK):
            out.write(read_range(self.url, start, min(start + BLOCK, self.size), self.access.retry_s))
        if out.tell() != self.size:
            raise DataError("it is shorter than recorded in its index")

    # ------------------------------------------------------------------------------------------------- samples

    def places(self, listed: int) -> NDArray[np.int64]:
        """Returns the places of the usable samples in a shard with a listed number of samples."""
        import numpy as np

        if listed == self.samples + len(self.skipped):
            return np.delete(np.arange(listed), list(self.skipped))
        return np.arange(min(listed, self.samples))

    def row(self, place: int, listed: int) -> int | None:
        """Returns the row of the sample at a place: see `places`. None if there is none."""
        if not self.skipped or listed != self.samples + len(self.skipped):
            return place if place < self.samples else None
        before = bisect_right(self.skipped, place)
        return None if before and self.skipped[before - 1] == place else place - before

    def name(self, row: int) -> str:
        """Returns the name of a sample. Raises an error if it cannot be read."""
        offset = int(load_table(self.table)[row, IMAGE, 0])
        return tarfile.TarInfo.frombuf(self.fetch((offset - 512, 512)), "utf-8", "surrogateescape").name

    def members(self, row: int, columns: Iterable[int]) -> dict[int, Span]:
        """Returns the spans of the members of a sample, by column, without those that it lacks. Raises BadSample."""
        spans: list[Span] = [(offset, size) for offset, size in load_table(self.table)[row].tolist()]
        return {column: spans[column] for column in columns if spans[column][1] > 0}

    def read(self, members: Mapping[int, Span]) -> dict[int, bytes]:
        """Returns the content of the members of a sample, by column. Raises as `fetch`."""
        requests = joined(list(members.values()))
        contents = [self.fetch(span) for span in requests]
        if len(requests) == len(members):
            return dict(zip(members, contents, strict=True))
        first = requests[0][0]
        return {column: contents[0][start - first : start - first + size] for column, (start, size) in members.items()}

    def fetch(self, span: Span) -> bytes:
        """Returns the bytes of a span, from its request if there is one. Raises BadSample if the shard is missing or
        too short, and DataError if the storage fails, or refuses all requests, for `retry_s`: credentials may expire
        during a run."""
        try:
            if self.local:
                # The variable keeps the file open during the read: if two threads open it at once, the cache keeps one.
                opened = _opened(self.url, self.table)
                content = os.pread(opened.fileno(), span[1], span[0])
            else:
                future = this_process().requested(self, span)
                content = self.fetch_remote(span) if future is None else future.result()
        except DataError:
            raise
        except Exception as error:  # a remote file system raises the exceptions of its library
            raise BadSample(f"shard cannot be read: {error_text(error)}") from None
        if len(content) < span[1]:
            raise BadSample("shard is shorter than recorded in its index")
        return content

    def fetch_remote(self, span: Span) -> bytes:
        """Reads a span from the cache, or as a byte range, and starts to fetch the whole shard into the cache."""
        if self.cacheable:
            if (content := read_cached(self.cache_path, span)) is not None:
                return content
            store_in_background(self)
        return read_range(self.url, span[0], sum(span), self.access.retry_s, patient=True)


@lru_cache(maxsize=128)
def _opened(url: str, _table: str) -> IO[bytes]:
    """Opens a local file and leaves it open: opening costs more than reading a sample, above all on network storage."""
    return Path(local_path(url)).open("rb", buffering=0)


def joined(spans: Sequence[Span]) -> Sequence[Span]:
    """Returns the ranges to request for a sample: one range if its members are close together, else one per member."""
    start, end = min(offset for offset, _ in spans), max(offset + size for offset, size in spans)
    if end - start > sum(size for _, size in spans) + _GAP:
        return spans
    return [(start, end - start)]


def index_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Returns the shards with the content of their indices. Creates those that are not in the cache. Raises DataError
    if a shard does not exist or cannot be read."""
    with ThreadPoolExecutor(32) as pool:  # a remote request takes about 50 ms
        found = list(pool.map(Shard.find, shards))
    new = [shard for shard in found if not shard.indexed]
    if all(shard.local for shard in new):
        run_in_pool(index_tar, new, "indexing")
    elif len(new) <= _REMOTE:
        run_in_pool(index_tar, new, "indexing", threads=_REMOTE)
    else:
        run_in_pool(index_tar, new, "indexing", processes=max(_REMOTE, len(os.sched_getaffinity(0))))
    return [shard.load() for shard in found]
