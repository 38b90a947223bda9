"""Every read of a file that may be far away: any URL of fsspec, with retries, read-ahead and a cache of whole files.

fsspec has the file systems and the block cache. Of its own this module has two things that are not there:

* One bounded time for all retries. s3fs retries time-outs and botocore 5xx, each by a count, and a silent server costs
  413 s with their defaults; so both are told to try once, and `persist` tries again until `Access.retry_s` is over.
* A cache of whole files with a limit. fsspec's `filecache` and `simplecache` grow without end, and each process
  fetches for itself; here the loader processes of a machine share one folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

from clipx.data.source import BadSample
from clipx.data.write import cache_folder, made
from clipx.errors import DataError, require

T = TypeVar("T")
Span = tuple[int, int]
"""(first byte, number of bytes)"""

BLOCK = 16 << 20  # bytes a request where a file is read from front to end
_CONNECT_S, _READ_S = 5, 20  # of S3: longer silence is an error, which is retried
_DELAY_S = (0.1, 10.0)  # before the second try, and at most; doubled from try to try
_TOLD_AFTER = 10.0  # seconds of failing before a line on stderr
_CACHE_PAUSE = 60.0  # seconds until the cache is tried again where it could not be written
_REQUESTS = 32  # at a time and process: a remote read waits for some 50 ms and computes nothing
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, ImportError)
_FINAL_ERRNO = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", errno.ENOENT)}
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
_JITTER = random.SystemRandom()  # never the seeded one, whose draws belong to the samples


@dataclass(frozen=True, slots=True)
class Access:
    """How remote files are read; local ones are read as they are."""

    retry_s: float = 120.0  # seconds in all that a read is tried again
    cache_bytes: int = 0  # limit of the cache of whole files; 0 for none
    cache_dir: str | None = None  # its folder; None: shards in the cache folder

    @property
    def folder(self) -> Path:
        return _cache_dir(self.cache_dir)


@lru_cache(maxsize=8)
def _cache_dir(path: str | None) -> Path:
    if path is None:
        return cache_folder("shards")
    return made(Path(path).expanduser(), f"data.cache_dir={path}", "give")


def check_access(retry_s: float, cache_gb: float) -> None:
    require(retry_s >= 0, f"data.retry_s={retry_s} is negative: give 0, to try once, or more seconds")
    require(cache_gb >= 0, f"data.cache_gb={cache_gb} is negative: give 0, for no cache, or its limit in GB")


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """Of a URL that is local."""
    return os.path.expanduser(url.partition("://")[2] if "://" in url else url)  # noqa: PTH111


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's (file system, path). Kept by fsspec for each process, and made anew after a fork.

    What the user says of S3 in fsspec's own configuration (FSSPEC_S3_…, ~/.config/fsspec) and in AWS_… holds.
    """
    import fsspec

    if url.startswith(("s3://", "s3a://")):
        ours = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "max_pool_connections": 2 * _REQUESTS}
        options = fsspec.config.conf.setdefault("s3", {}).setdefault("config_kwargs", {})
        for key, value in {**ours, "retries": {"total_max_attempts": 1}}.items():
            options.setdefault(key, value)
        fs, path = fsspec.core.url_to_fs(url)
        fs.retries = 1
        return fs, path
    return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]


def persist(url: str, retry_s: float, call: Callable[[], T]) -> T:
    """`call()`, tried again with growing, jittered pauses while the storage fails in a way that may pass.

    What will not pass (a file that is not there, no permission) is raised as it is, an outage as DataError.
    """
    start, delay = time.monotonic(), _DELAY_S[0]
    while True:
        try:
            return call()
        except Exception as error:  # a remote file system raises what its library does
            if is_local(url) or is_final(error):
                raise
            spent = time.monotonic() - start
            if spent + delay > retry_s:
                raise DataError(
                    f"{url} cannot be read: for {spent:.0f} s the storage failed ({said(error)}); check it and the "
                    f"network, or try longer than retry_s={retry_s:g}"
                ) from None
            if spent > _TOLD_AFTER:
                _tell(
                    f"{url}: the storage fails ({said(error)}); trying for {retry_s - spent:.0f} s more",
                    int(start) // 60,
                )
        time.sleep(delay * _JITTER.uniform(0.5, 1))
        delay = min(2 * delay, _DELAY_S[1])


@lru_cache(maxsize=1)
def _tell_once(_minute: int) -> list[str]:
    return []


def _tell(text: str, minute: int) -> None:
    """On stderr, once a minute and process: many reads fail together."""
    if not _tell_once(minute):
        _tell_once(minute).append(text)
        print(text, file=sys.stderr, flush=True)


def is_final(error: Exception) -> bool:
    """Whether the same request would fail again: nothing there, not allowed, not understood."""
    if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
        return True
    if isinstance(error, OSError) and error.errno in _FINAL_ERRNO:
        return True
    status = vars(error).get("status", vars(error).get("code"))  # of HTTP, as aiohttp and gcsfs name it
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


def said(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------------- whole files


def read_whole(url: str, retry_s: float) -> bytes:
    """A small file, such as a list. Raises what the file system does, or DataError for an outage."""

    def call() -> bytes:
        fs, path = file_system(url)
        content: bytes = fs.cat_file(path)
        return content

    return persist(url, retry_s, call)


def read_range(url: str, start: int, end: int, retry_s: float) -> bytes:
    """Fewer bytes where the file ends before. Raises what the file system does, or DataError."""

    def call() -> bytes:
        fs, path = file_system(url)
        content: bytes = fs.cat_file(path, start=start, end=end)
        return content

    content = persist(url, retry_s, call)
    if len(content) > end - start:
        raise DataError(f"{url}: its server sends the whole file where a part is asked for: use one that knows ranges")
    return content


@contextlib.contextmanager
def sequential(url: str, size: int, retry_s: float) -> Iterator[IO[bytes]]:
    """A file to be read from front to end. Of a remote one the next block is fetched while this one is read.

    Headers lie every 30 KB in a usual shard: 512 bytes of each by a request of its own would be a request every 20 ms,
    where one of 16 MiB brings five hundred. Members larger than blocks are stepped over without being fetched.
    """
    if is_local(url):
        with Path(local_path(url)).open("rb") as file:
            yield file
        return
    from fsspec.caching import BackgroundBlockCache

    def fetch(start: int, end: int) -> bytes:
        return read_range(url, start, end, retry_s)

    cache = BackgroundBlockCache(BLOCK, fetch, size, maxblocks=3)
    try:
        yield _Sequential(cache, size)  # type: ignore[misc]  # all that tarfile needs of a file
    finally:
        cache.close()


class _Sequential(io.RawIOBase):
    def __init__(self, cache: Any, size: int) -> None:
        self.cache, self.size, self.place = cache, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def read(self, size: int = -1) -> bytes:
        end = self.size if size < 0 else min(self.size, self.place + size)
        content: bytes = self.cache._fetch(self.place, end) if end > self.place else b""
        self.place += len(content)
        return content


# ------------------------------------------------------------------------------------------------------ spans


@dataclass(frozen=True, slots=True)
class File:
    """A file that spans are read from. `version` is its index's name: another one is another content."""

    url: str
    version: str
    size: int
    access: Access

    @property
    def local(self) -> bool:
        return is_local(self.url)


def expect(reader: str, spans: Sequence[tuple[File, Span]]) -> None:
    """These will be read soon: all that are remote are asked for at once, so that only the first is waited for.

    What the same reader expected before and has not read is forgotten.
    """
    ahead = _ahead(os.getpid())
    for future in ahead.futures.pop(reader, {}).values():
        future.cancel()
    ahead.futures[reader] = {
        (file, span): ahead.threads.submit(_fetch, file, span)
        for file, span in spans
        if not file.local and not (_cacheable(file) and _place(file).exists())
    }


def fetch(file: File, offset: int, size: int) -> bytes:
    """Raises BadSample where the file is gone or too short, DataError where the storage failed for `retry_s`."""
    try:
        future = None if file.local else _asked(file, (offset, size))
        span = _fetch(file, (offset, size)) if future is None else future.result()
    except DataError:
        for reader in list(_ahead(os.getpid()).futures):
            expect(reader, [])  # nor will those be read that wait behind it
        raise
    except Exception as error:  # a remote file system raises what its library does
        raise BadSample(f"shard cannot be read: {said(error)}") from None
    if len(span) < size:
        raise BadSample("shard is shorter than its index says")
    return span


def _asked(file: File, span: Span) -> Future[bytes] | None:
    for futures in _ahead(os.getpid()).futures.values():
        if (file, span) in futures:
            return futures.pop((file, span))
    return None


def _fetch(file: File, span: Span) -> bytes:
    offset, size = span
    if file.local:
        return os.pread(_opened(local_path(file.url), file.version).fileno(), size, offset)
    if _cacheable(file) and (content := _from_cache(file, span)) is not None:
        return content
    return read_range(file.url, offset, offset + size, file.access.retry_s)


@lru_cache(maxsize=128)
def _opened(path: str, version: str) -> IO[bytes]:
    """It stays open because opening costs more than reading a sample, above all on a network's file system."""
    return Path(path).open("rb", buffering=0)


class _Ahead:
    """What a process has asked for and not yet read. Threads do not survive a fork, hence one for each process id."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="clipx-read")
        self.futures: dict[str, dict[tuple[File, Span], Future[bytes]]] = {}  # by reader
        self.fetching = threading.Lock()  # one whole file at a time and process
        self.not_before = 0.0  # time of the next try, after the cache failed


@lru_cache(maxsize=1)
def _ahead(_process: int) -> _Ahead:
    return _Ahead()


# ------------------------------------------------------------------------------------------------------ cache


def _cacheable(file: File) -> bool:
    return 0 < file.size <= file.access.cache_bytes


def _place(file: File) -> Path:
    return file.access.folder / f"{file.version}.tar"


def _from_cache(file: File, span: Span) -> bytes | None:
    """None where the file is not in the cache: then samples come by ranges while a thread fetches it whole.

    So nothing waits for a whole file, and a cache that is full or fails costs speed only.
    """
    path = _place(file)
    try:
        with path.open("rb", buffering=0) as opened:  # not kept open: what is evicted must free its space
            _used(str(path), int(time.monotonic()) // 60)
            return os.pread(opened.fileno(), span[1], span[0])
    except OSError:
        _fetch_in_background(file, path)
        return None


@lru_cache(maxsize=256)
def _used(path: str, _minute: int) -> None:
    """Notes the time of use, for the eviction. Once a minute is often enough."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _fetch_in_background(file: File, path: Path) -> None:
    ahead = _ahead(os.getpid())
    if time.monotonic() < ahead.not_before or not ahead.fetching.acquire(blocking=False):
        return

    def run() -> None:
        try:
            _store(file, path)
        except (DataError, OSError) as error:
            ahead.not_before = time.monotonic() + _CACHE_PAUSE
            print(f"{file.url} is not cached: {said(error)}", file=sys.stderr)
        finally:
            ahead.fetching.release()

    threading.Thread(target=run, daemon=True, name="clipx-cache").start()


def _store(file: File, path: Path) -> None:
    """Fetches a file into the cache, unless another process does. It has its name when it is whole."""
    part = path.with_suffix(".part")
    with (path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # room is made by one process at a time
        target = part.open("ab")
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process that holds it
        except OSError:
            target.close()
            return
        if path.exists() or not _make_room(path.parent, part, file.size, file.access.cache_bytes):
            part.unlink()
            target.close()
            return
        target.truncate(0)
        os.truncate(part, file.size)  # counted by others from now on
    with target, part.open("r+b") as out:
        try:
            for start in range(0, file.size, BLOCK):
                out.write(read_range(file.url, start, min(start + BLOCK, file.size), file.access.retry_s))
            if out.tell() != file.size:
                raise DataError("it is shorter than its index says")
            out.flush()
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _make_room(folder: Path, mine: Path, size: int, limit: int) -> bool:
    """Deletes what was used longest ago, and what a killed process left. Open files stay readable."""
    files = {p: p.stat() for p in folder.iterdir() if p.suffix in (".tar", ".part") and p != mine}
    for path in [p for p in files if p.suffix == ".part"]:
        with path.open("rb") as left, contextlib.suppress(OSError):
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            del files[path]
    held = sum(stat.st_size for stat in files.values())
    for path in sorted((p for p in files if p.suffix == ".tar"), key=lambda p: files[p].st_mtime):
        if held + size <= limit:
            break
        path.unlink(missing_ok=True)
        held -= files[path].st_size
    return held + size <= limit
