"""State of a process that reads samples: its threads, its pending requests, the shards in use and reused memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from clipx.storage.remote import REQUESTS

if TYPE_CHECKING:
    import torch

    from clipx.data.shards.index import Span
    from clipx.data.shards.shard import Shard

T = TypeVar("T")

_WHOLE_SHARDS = 2  # whole shards that a process fetches at a time


class Threads:
    """Threads, `most` at a time, which make calls in their order. They are daemons, unlike the threads of an executor:
    the process ends without waiting for what it does not read."""

    def __init__(self, most: int) -> None:
        self._unstarted = most
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Returns the future result of a call in another thread."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        if self._unstarted:
            self._unstarted -= 1
            threading.Thread(target=self._run, name="clipx-read", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


class LoaderProcess:
    """State of a process that reads samples. `sends_batches`: whether it is a loader process of a trainer."""

    def __init__(self, sends_batches: bool = False) -> None:
        self.sends_batches = sends_batches
        self.datasets: dict[bytes, Any] = {}  # data sets of a loader process by their descriptions, see LoaderPool
        self.shards: dict[tuple[float, Shard], Shard] = {}
        """The prepared shard of (time at which its source was opened, shard)."""

        self.ahead: dict[tuple[float, Shard], Future[Shard | None]] = {}
        """Shards that are being prepared before they are read."""

        self.whole_shards = Threads(_WHOLE_SHARDS)
        self.caching = Future[None]()  # the last background fetch of a shard into the cache
        self.caching.set_result(None)
        self.cache_again_at = 0.0  # time of the monotonic clock until which nothing is cached, after a failure
        self.unstored = ("", b"")  # version and content of the last row group that could not be cached
        self.row_buffers: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        """Memory of rows by shape and type of a row."""

        self.shared_files: list[int] = []  # descriptors of files of shared memory that are used again
        self._ranges = Threads(REQUESTS)
        self._requests: dict[str, dict[tuple[Shard, Span], Future[bytes]]] = {}  # pending ones by reader

    def request(self, reader: str, spans: Iterable[tuple[Shard, Span]]) -> None:
        """Requests the remote spans that `reader` reads next, all at once, so that it waits for the first one only."""
        for future in self._requests.pop(reader, {}).values():
            future.cancel()
        self._requests[reader] = {
            (shard, span): self._ranges.submit(partial(shard.fetch_remote, span))
            for shard, span in spans
            if not shard.local and not (shard.cacheable and shard.cache_path.exists())
        }

    def requested(self, shard: Shard, span: Span) -> Future[bytes] | None:
        """Removes and returns the request of a span; None if there is none."""
        for requests in self._requests.values():
            if (shard, span) in requests:
                return requests.pop((shard, span))
        return None


_this = LoaderProcess()


def this_process() -> LoaderProcess:
    """Returns the state of this process."""
    return _this


def start_process(sends_batches: bool = False) -> None:
    """Replaces the state of this process by an empty one: see LoaderProcess."""
    global _this
    _this = LoaderProcess(sends_batches)


os.register_at_fork(after_in_child=start_process)  # threads, and locks that they hold, do not survive a fork
