"""Reading shards that may be far away: front to end for their index, and by the spans of samples, asked for ahead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from clipx.data.shards.cache import ShardFile, Span, read_cached
from clipx.data.source import BadSample
from clipx.errors import DataError
from clipx.storage.remote import BLOCK, REQUESTS, error_text, file_system, is_local, local_path, read_range


def open_sequential(url: str, size: int, retry_s: float) -> IO[bytes]:
    """Opens a file to be read from front to end. Of a remote one the next block is fetched while this one is read.

    Headers lie every 30 KB in a usual shard: 512 bytes of each by a request of its own would be a request every 20 ms,
    where one of 16 MiB brings five hundred. Members larger than blocks are stepped over without being fetched.
    """
    if is_local(url):
        return Path(local_path(url)).open("rb")
    from fsspec.caching import BackgroundBlockCache
    from fsspec.spec import AbstractBufferedFile

    file: Any = AbstractBufferedFile(*file_system(url), size=size)
    fetch_block = partial(read_range, url, retry_s=retry_s)  # with our retries
    file.cache = BackgroundBlockCache(BLOCK, fetch_block, size, maxblocks=3)
    return file  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ spans


def prefetch_spans(reader: str, spans: Sequence[tuple[ShardFile, Span]]) -> None:
    """Requests all remote spans that are read next at once, so that only the first is waited for.

    Requests of the same reader that it has not read are cancelled.
    """
    ahead = _prefetcher(os.getpid())
    for future in ahead.futures.pop(reader, {}).values():
        future.cancel()
    ahead.futures[reader] = {
        (file, span): ahead.threads.submit(_fetch, file, span)
        for file, span in spans
        if not file.local and not (file.cacheable and file.cache_path.exists())
    }


def fetch(file: ShardFile, offset: int, size: int) -> bytes:
    """Raises BadSample where the file is gone or too short, DataError where the storage failed for `retry_s`."""
    try:
        future = None if file.local else _take_prefetched(file, (offset, size))
        span = _fetch(file, (offset, size)) if future is None else future.result()
    except DataError:
        for reader in list(_prefetcher(os.getpid()).futures):
            prefetch_spans(reader, [])  # nor will those be read that wait behind it
        raise
    except Exception as error:  # a remote file system raises what its library does
        raise BadSample(f"shard cannot be read: {error_text(error)}") from None
    if len(span) < size:
        raise BadSample("shard is shorter than its index says")
    return span


def _take_prefetched(file: ShardFile, span: Span) -> Future[bytes] | None:
    for futures in _prefetcher(os.getpid()).futures.values():
        if (file, span) in futures:
            return futures.pop((file, span))
    return None


def _fetch(file: ShardFile, span: Span) -> bytes:
    offset, size = span
    if file.local:
        opened = _opened(local_path(file.url), file.version)  # held: of two threads' at once only one is kept open
        return os.pread(opened.fileno(), size, offset)
    if file.cacheable and (content := read_cached(file, span)) is not None:
        return content
    return read_range(file.url, offset, offset + size, file.access.retry_s)


@lru_cache(maxsize=128)
def _opened(path: str, version: str) -> IO[bytes]:
    """It stays open because opening costs more than reading a sample, above all on a network's file system."""
    return Path(path).open("rb", buffering=0)


class _Prefetcher:
    """The requests of a process that are not yet read. Threads do not survive a fork: there is one for each process."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="clipx-read")
        self.futures: dict[str, dict[tuple[ShardFile, Span], Future[bytes]]] = {}  # by reader


@lru_cache(maxsize=1)
def _prefetcher(_process: int) -> _Prefetcher:
    return _Prefetcher()
