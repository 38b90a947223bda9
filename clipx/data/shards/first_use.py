"""Shards on their first use: found, stored whole if they are read whole, and indexed, once per machine.

A shard whose index was not made before the run has a listed number of samples only. The first loader process of the
machine that reads one of them does the work under a lock, and the others wait for it and share the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue

from filelock import FileLock, Timeout

from clipx.data.shards.cache import Access, ShardFile, release, store_now
from clipx.data.shards.index import IMAGE, FoundShard, MissingShard, ShardIndex, find_shard, load_table, make_index
from clipx.data.shards.remote import fetch
from clipx.data.source import BadRecord
from clipx.storage.files import local_path
from clipx.storage.local import cache_folder, write_text
from clipx.storage.safe_json import parse_json, read_regular

_THREADS = 2  # shards that a loader process fetches ahead at a time


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The shards of a source before their first use.

    `opened`: time since 1970 at which the source was opened. A shard found since then is not looked up again.
    """

    captions: tuple[int, ...]
    access: Access
    opened: float
    known: dict[str, ShardIndex]
    """Indices that were made before, by URL."""

    def index(self, url: str) -> ShardIndex:
        """Returns the index of a shard, which is then stored if shards are read whole.

        A shard that does not exist has no samples. Raises DataError if the storage fails for `retry_s`.
        """
        process = _process(os.getpid())
        found = process.indices.get((self.opened, url))
        if found is None:
            ahead = process.ahead.pop((self.opened, url), None)
            found = ahead.result() if ahead is not None and ahead.done() else None
            found = found or self._first_use(url, wait=True)
            assert found is not None
            process.indices[self.opened, url] = found
        return found

    def read_ahead(self, later: Sequence[str], done: Sequence[str]) -> None:
        """Fetches shards in the background, and releases those that are done."""
        process = _process(os.getpid())
        for url in done:
            if (ahead := process.ahead.pop((self.opened, url), None)) is not None:
                ahead.cancel()
            if (found := process.indices.pop((self.opened, url), None)) is not None:
                self._release(url, found)
        for url in later:
            key = (self.opened, url)
            if key not in process.indices and key not in process.ahead:
                process.ahead[key] = process.submit(partial(self._first_use, url, wait=False))

    def file(self, url: str, index: ShardIndex) -> ShardFile:
        return ShardFile(url, Path(index.table).stem, index.size, self.access)

    def name(self, url: str, index: ShardIndex, row: int) -> str:
        """Returns the name of a sample in its shard. Raises an error if it cannot be read."""
        offset = int(load_table(index.table)[row, IMAGE, 0])
        header = fetch(self.file(url, index), offset - 512, 512)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name

    def _first_use(self, url: str, wait: bool) -> ShardIndex | None:
        """Returns the index of a shard; None if another process is preparing it and `wait` is false."""
        digest = hashlib.sha256(f"{url} {self.captions}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        record = cache_folder("index") / f"{digest}.found"
        try:
            with FileLock(record.with_suffix(".lock"), thread_local=False).acquire(blocking=wait):
                return self._prepare(url, record)
        except Timeout:
            return None

    def _prepare(self, url: str, record: Path) -> ShardIndex:
        if (known := self.known.get(url)) is not None:
            self._store(url, known)
            return known
        try:
            item = self._recorded(url, record) or self._found(url, record)
        except MissingShard:
            empty = [BadRecord(url, "shard does not exist")]
            return ShardIndex("", 0, "", empty, (), 0)
        file = ShardFile(url, item.table.stem, item.size, self.access)
        if self.access.whole:
            self._fetch(file)
        if not item.indexed:
            stored = None if file.local or not file.cacheable else file.cache_path
            content = str(stored) if stored is not None and stored.exists() else None
            make_index(self.captions, self.access.retry_s, item, content, cross_check=False)
        return item.load()

    def _recorded(self, url: str, record: Path) -> FoundShard | None:
        """Returns what this run has found before, on this machine."""
        try:
            table, size, found_at = parse_json(read_regular(record))
        except (OSError, ValueError):
            return None
        return FoundShard(url, Path(table), size) if found_at >= self.opened else None

    def _found(self, url: str, record: Path) -> FoundShard:
        item = find_shard(self.captions, self.access.retry_s, url, patient=True)
        content = json.dumps([str(item.table), item.size, time.time()])
        write_text(record, content)
        return item

    def _store(self, url: str, index: ShardIndex) -> None:
        if self.access.whole:
            self._fetch(self.file(url, index))

    def _fetch(self, file: ShardFile) -> None:
        """Fetches a whole shard: into the cache, or a local one into the memory of the operating system."""
        if file.local:
            _advise(file.url, os.POSIX_FADV_WILLNEED)
        elif file.cacheable:
            store_now(file)

    def _release(self, url: str, index: ShardIndex) -> None:
        if not self.access.whole or not index.table:
            return
        file = self.file(url, index)
        if file.local:
            _advise(url, os.POSIX_FADV_DONTNEED)
        else:
            release(file)


def _advise(url: str, advice: int) -> None:
    try:
        with Path(local_path(url)).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, advice)
    except OSError:  # reading it reports the fault
        return


class _Process:
    """State of a process. Each has one, because threads do not survive a fork."""

    def __init__(self) -> None:
        self.indices: dict[tuple[float, str], ShardIndex] = {}
        self.ahead: dict[tuple[float, str], Future[ShardIndex | None]] = {}
        self._calls: SimpleQueue[tuple[Future[ShardIndex | None], Callable[[], ShardIndex | None]]] = SimpleQueue()
        # Daemons, unlike the threads of an executor: the process ends without waiting for shards that it does not read.
        for _ in range(_THREADS):
            threading.Thread(target=self._run, name="clipx-read", daemon=True).start()

    def submit(self, call: Callable[[], ShardIndex | None]) -> Future[ShardIndex | None]:
        """Returns the future result of a call in another thread."""
        future: Future[ShardIndex | None] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


@lru_cache(maxsize=1)
def _process(_pid: int) -> _Process:
    return _Process()
