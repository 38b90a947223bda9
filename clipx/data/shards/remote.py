"""Reads local and remote shards: sequentially for their index, and by prefetched byte spans for samples."""

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
from clipx.storage.files import is_local, local_path


def open_sequential(url: str, size: int, retry_s: float) -> IO[bytes]:
    """Opens a file for sequential reading. The next block of a remote file is fetched while the current one is read.

    A typical shard has a header every 30 KB. Separate requests of 512 bytes would take 20 ms each, whereas one request
    of 16 MiB returns five hundred headers. Members larger than a block are skipped without fetching them.
    """
    if is_local(url):
        return Path(local_path(url)).open("rb")
    from fsspec.caching import BackgroundBlockCache
    from fsspec.spec import AbstractBufferedFile

    from clipx.storage.remote import BLOCK, file_system, read_range

    file: Any = AbstractBufferedFile(*file_system(url), size=size)
    fetch_block = partial(read_range, url, retry_s=retry_s)  # instead of fsspec's, which has other retries
    file.cache = BackgroundBlockCache(BLOCK, fetch_block, size, maxblocks=3)
    return file  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ spans


def prefetch_spans(reader: str, spans: Sequence[tuple[ShardFile, Span]]) -> None:
    """Requests the remote spans that `reader` reads next, all at once, so that it waits for the first one only.

    Cancels pending requests of the same reader.
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
    """Returns `size` bytes of a file from `offset`, from its prefetch request if there is one.

    Raises BadSample if the file is missing or too short, and DataError if the storage fails, or refuses all requests,
    for `retry_s`: credentials may expire during a run.
    """
    try:
        future = None if file.local else _take_prefetched(file, (offset, size))
        span = _fetch(file, (offset, size)) if future is None else future.result()
    except DataError:
        for reader in list(_prefetcher(os.getpid()).futures):
            prefetch_spans(reader, [])  # cancels all pending requests, which would wait for the same failing storage
        raise
    except Exception as error:  # a remote file system raises the exceptions of its library
        from clipx.storage.failure import error_text

        raise BadSample(f"shard cannot be read: {error_text(error)}") from None
    if len(span) < size:
        raise BadSample("shard is shorter than recorded in its index")
    return span


def _take_prefetched(file: ShardFile, span: Span) -> Future[bytes] | None:
    for futures in _prefetcher(os.getpid()).futures.values():
        if (file, span) in futures:
            return futures.pop((file, span))
    return None


def _fetch(file: ShardFile, span: Span) -> bytes:
    offset, size = span
    if file.local:
        # The variable keeps the file open during the read: if two threads open it at once, the cache keeps only one.
        opened = _opened(local_path(file.url), file.version)
        return os.pread(opened.fileno(), size, offset)
    if file.cacheable and (content := read_cached(file, span)) is not None:
        return content
    return file.read_uncached(span)


@lru_cache(maxsize=128)
def _opened(path: str, version: str) -> IO[bytes]:
    """Opens a local file and leaves it open: opening costs more than reading a sample, above all on network storage."""
    return Path(path).open("rb", buffering=0)


class _Prefetcher:
    """Pending requests of a process. Each process has one, because threads do not survive a fork."""

    def __init__(self) -> None:
        from clipx.storage.remote import REQUESTS

        self.threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="clipx-read")
        self.futures: dict[str, dict[tuple[ShardFile, Span], Future[bytes]]] = {}  # keyed by reader


@lru_cache(maxsize=1)
def _prefetcher(_process: int) -> _Prefetcher:
    return _Prefetcher()
