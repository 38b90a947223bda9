"""Files at any URL of fsspec, with bounded time-outs, retries and atomic uploads.

s3fs retries time-outs and botocore 5xx, each by a count: a server that does not answer costs 413 s with their defaults.
Both are limited to one attempt here, and `retry` repeats a call until the caller's `retry_s` has passed.
"""

from __future__ import annotations

import gc
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from clipx.errors import ClipxError, DataError, StorageError
from clipx.escape import print_stderr
from clipx.storage.bounded import MOST_BYTES, WHOLE_FILE, BadAnswer, complete, http_session, time_left, time_limit
from clipx.storage.failure import Failure, FailureKind
from clipx.storage.files import is_local, local_path
from clipx.storage.hub_repository import HubFile

T = TypeVar("T")

BLOCK = 16 << 20  # bytes per request of a sequential read
REQUESTS = 32  # concurrent per process: a remote read waits for some 50 ms and computes nothing
_CONNECT_S, _READ_S = 5, 20  # time-outs of S3 requests; a time-out is retried
# Complete: botocore would add a missing mode to this dictionary, and fsspec would take that for another configuration.
_SINGLE_ATTEMPT = {"total_max_attempts": 1, "mode": "standard"}
_PART = 16 << 20  # bytes per part of an S3 upload; s3fs holds and sends ten parts at once
# Longest time without a completed part: aiohttp has no limit for a server that stops reading. 0.5 MB/s is enough.
_STALL_S = 300.0
_PARALLEL_BLOCKS = 8  # concurrent blocks of a download
_POLL_S = 0.1  # between checks of the stop event
_DELAY_S = (0.1, 10.0)  # before the second attempt, and the longest
_TRY_S = 10.0  # shortest time limit of the first attempt: retry_s=0 tries once
_WARN_AFTER_S, _WARN_EVERY_S = 10.0, 60.0  # failure before the first warning on stderr, and between warnings
_RELOAD_S = 10.0  # shortest time between two loads of the credentials
_JITTER = random.SystemRandom()  # not the seeded generator, whose draws are reserved for the samples
_warned = -math.inf  # time of this process's last warning
_reloaded = -math.inf  # time of its last `reload_credentials`
# fsspec drops the file systems of the parent in a forked child. Collecting them there would close their connections,
# which removes these from the epoll that both processes share: the parent's next request would wait for its time-out.
os.register_at_fork(after_in_child=gc.freeze)


def file_system(url: str, tries: int = 1) -> tuple[Any, str]:
    """Returns fsspec's (file system, path). The user's settings in fsspec's configuration and in AWS_… take precedence.

    `tries`: attempts per S3 request, for callers that do not use `retry`.
    """
    import fsspec

    if url.startswith(("http://", "https://")):
        fsspec.config.conf.setdefault("http", {}).setdefault("get_client", http_session)
    if not _is_s3(url):
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    ours = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "max_pool_connections": 2 * REQUESTS}
    options = fsspec.config.conf.setdefault("s3", {}).setdefault("config_kwargs", {})
    for key, value in {**ours, "retries": _SINGLE_ATTEMPT}.items():
        options.setdefault(key, value)
    if tries > 1 and options["retries"] == _SINGLE_ATTEMPT:
        again = {"total_max_attempts": tries, "mode": "standard"}
        fs, path = fsspec.core.url_to_fs(url, config_kwargs={**options, "retries": again})
    else:
        fs, path = fsspec.core.url_to_fs(url)
    fs.retries = 1
    return fs, path


def _is_s3(url: str) -> bool:
    return url.startswith(("s3://", "s3a://"))


# ------------------------------------------------------------------------------------------------------- retries


def backoff(first: float, most: float) -> Iterator[float]:
    """Yields the seconds before each retry: doubled, up to `most`, and jittered, because ranks fail together."""
    delay = first
    while True:
        yield delay * _JITTER.uniform(0.5, 1)
        delay = min(2 * delay, most)


def retry(url: str, retry_s: float, call: Callable[[], T], patient: bool = False) -> T:
    """Returns `call()`, retried with growing, jittered pauses after transient errors of a remote storage.

    An attempt is given up when `retry_s` are over, the first one after 10 s at the earliest. Raises StorageError after
    an outage of `retry_s` seconds, or at once if the storage asks to wait for longer; StorageRefused at once if it
    refuses all requests, unless `patient`: requests of this run succeeded before, and the credentials are reloaded;
    DataError for an answer that no retry improves; other errors (no such file, invalid request) unchanged.
    """
    start, limit_s = time.monotonic(), max(retry_s, _TRY_S)
    for pause in backoff(*_DELAY_S):
        try:
            with time_limit(limit_s):
                return call()
        except BadAnswer as error:
            raise DataError(f"{url}: its server {error}") from None
        except Exception as error:  # a remote file system raises errors of its library
            failure = Failure.classify(url, error)
            if is_local(url) or failure.kind is FailureKind.object or isinstance(error, ClipxError):
                raise
            spent, pause = time.monotonic() - start, max(pause, failure.wait_s)
            over = spent + pause > retry_s
            if failure.refuses_all and (over or not patient):
                raise failure.refused(url) from None
            if over:
                asked = f" and asks to wait for {failure.wait_s:,.0f} s" if failure.wait_s else ""
                raise StorageError(
                    f"{url} cannot be read: the storage failed for {spent:.0f} s ({failure.reason}){asked}: check it "
                    f"and the network, or raise retry_s={retry_s:g}"
                ) from None
            if failure.refuses_all:
                reload_credentials(url)
            if spent > _WARN_AFTER_S:
                _warn(f"{url}: the storage fails ({failure.describe(url)}): retrying for {retry_s - spent:.0f} s")
        time.sleep(pause)
        limit_s = retry_s - (time.monotonic() - start)
    raise AssertionError  # unreachable: backoff does not end


def reload_credentials(url: str) -> None:
    """Makes the next request open a new session with reloaded credentials, at most every 10 s per process."""
    global _reloaded
    if not is_local(url) and time.monotonic() - _reloaded > _RELOAD_S:
        _reloaded = time.monotonic()
        type(file_system(url)[0]).clear_instance_cache()


def _warn(text: str) -> None:
    """Prints a warning on stderr, at most once a minute per process: many reads fail together."""
    global _warned
    if time.monotonic() - _warned > _WARN_EVERY_S:
        _warned = time.monotonic()
        print_stderr(text)


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class StorageTraffic:
    """Number of requests that read from remote storage, and of bytes received."""

    requests: int = 0
    bytes: int = 0

    def plus(self, other: StorageTraffic) -> StorageTraffic:
        return StorageTraffic(self.requests + other.requests, self.bytes + other.bytes)


NO_TRAFFIC = StorageTraffic()
_counting = threading.Lock()
_traffic = NO_TRAFFIC  # of the threads of this process


def _count(requests: int, received: int = 0) -> None:
    global _traffic
    with _counting:
        _traffic = _traffic.plus(StorageTraffic(requests, received))


def take_traffic() -> StorageTraffic:
    """Returns the traffic of this process since the last call."""
    global _traffic
    with _counting:
        taken, _traffic = _traffic, NO_TRAFFIC
    return taken


def read_range(url: str, start: int, end: int, retry_s: float, patient: bool = False) -> bytes:
    """Reads bytes [start, end), fewer if the file ends earlier. Raises as `retry`, whose `patient` it takes."""
    return read_remote(url, retry_s, patient, start=start, end=end)


def open_sequential(url: str, size: int, retry_s: float) -> IO[bytes]:
    """Opens a file for sequential reading. The next block of a remote file is fetched while the current one is read."""
    if is_local(url):
        return Path(local_path(url)).open("rb")
    from fsspec.caching import BackgroundBlockCache
    from fsspec.spec import AbstractBufferedFile

    file: Any = AbstractBufferedFile(*file_system(url), size=size)
    fetch_block = partial(read_range, url, retry_s=retry_s)  # instead of fsspec's, which has other retries
    file.cache = BackgroundBlockCache(BLOCK, fetch_block, size, maxblocks=3)
    return file  # type: ignore[no-any-return]


def read_remote(url: str, retry_s: float, patient: bool = False, **span: Any) -> bytes:
    """Reads a small file, or of any file the bytes [start, end) of `span`."""
    hub, size = HubFile.parse(url), span["end"] - span["start"] if span else MOST_BYTES

    def call() -> bytes:
        content = hub.read(**span) if hub is not None else ask(url, "cat_file", size=size, **span)
        if span and len(content) > size:
            raise BadAnswer(WHOLE_FILE)
        if not is_local(url):
            _count(1, len(content))
        return bytes(content)

    return retry(url, retry_s, call, patient)


def ask(url: str, method: str, at: str | None = None, *, size: int = 0, **options: Any) -> Any:
    """Calls a method of a URL's file system with its path, or `at`, in the time of `retry` if it is asynchronous.

    `size`: bytes that it reads.
    """
    fs, path = file_system(url)
    path = path if at is None else at
    if not fs.async_impl or not hasattr(fs, f"_{method}"):
        return getattr(fs, method)(path, **options)
    alone = 0 if url.startswith(("http://", "https://")) else size  # these extend their time by themselves
    return complete(partial(getattr(fs, f"_{method}"), path, **options), alone)


def remote_info(url: str, retry_s: float, patient: bool = False) -> dict[str, Any]:
    """Returns fsspec's facts on a file, for a request, but none for a file of a commit on the Hugging Face hub."""
    hub = HubFile.parse(url)

    def call() -> dict[str, Any]:
        found: dict[str, Any] = hub.info() if hub is not None and hub.path else ask(url, "info")
        if not is_local(url) and not (hub is not None and hub.pinned):
            _count(1)
        return found

    return retry(url, retry_s, call, patient)


def download(url: str, path: Path, size: int, retry_s: float) -> None:
    """Downloads a file of `size` bytes, or less, to a new local file, several blocks at once. Each is retried alone."""
    starts = range(0, size, BLOCK)
    with path.open("xb") as out, ThreadPoolExecutor(_PARALLEL_BLOCKS) as threads:
        for group in (starts[i : i + _PARALLEL_BLOCKS] for i in range(0, len(starts), _PARALLEL_BLOCKS)):
            blocks = list(threads.map(lambda at: read_range(url, at, min(at + BLOCK, size), retry_s), group))
            out.writelines(blocks)
            if sum(map(len, blocks)) < min(group[-1] + BLOCK, size) - group[0]:
                return  # the end, whatever size the server claims


# ------------------------------------------------------------------------------------------------------- a folder


class TransferStopped(Exception):
    """Raised by a transfer that the `stop` event of its folder cancels."""


class StorageFolder:
    """Files under a URL, by their names below it, for use in one thread. Methods raise the file system's errors.

    On asynchronous file systems, such as those of object stores, a call raises TransferStopped soon after `stop` is
    set, and ConnectionError if no data moves for minutes.
    """

    def __init__(self, url: str, stop: threading.Event | None = None, tries: int = 1) -> None:
        self.url, self._tries = url.rstrip("/"), tries
        self._stop = stop or threading.Event()
        self._progressed_at = 0.0

    def files(self, below: str = "") -> dict[str, int]:
        """Returns the size in bytes of each file under a name, by file name. Empty if the name does not exist."""
        fs, path = self._path(below)
        _, root = self._path("")
        fs.invalidate_cache()
        found = self._call("find", path, detail=True)
        return {path[len(root) + 1 :]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def read(self, name: str) -> bytes:
        """Reads a small file."""
        content: bytes = self._call("cat_file", self._path(name)[1])
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        self._call("pipe_file", self._new_path(name), content)

    def put(self, path: Path, name: str) -> None:
        """Uploads a local file, in parts if it is large. In an object store it appears when it is complete."""
        from fsspec.callbacks import Callback

        options = {"chunksize": _PART} if _is_s3(self.url) else {}
        callback = Callback(hooks={"progress": self._progress})
        self._call("put_file", str(path), self._new_path(name), limit_s=_STALL_S, callback=callback, **options)

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._call("rm_file", self._path(name)[1])

    def remove_all(self, name: str) -> None:
        """Removes a folder."""
        self._call("rm", self._path(name)[1], recursive=True)

    def age_s(self, name: str) -> float:
        """Returns the seconds since a file was written."""
        fs, path = self._path(name)
        written: datetime = fs.modified(path)
        return (datetime.now(UTC) - (written if written.tzinfo else written.replace(tzinfo=UTC))).total_seconds()

    def abort_uploads(self, below: str, orphaned: Callable[[str, float], bool]) -> None:
        """Aborts multipart uploads for which `orphaned(name, age_s)` is true, which S3 would store and bill."""
        if not _is_s3(self.url):
            return
        fs, path = self._path(below)
        bucket, prefix, _ = fs.split_path(path)
        with suppress(PermissionError):
            found = self._call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/".lstrip("/"))
            for upload in found.get("Uploads", []):
                name = f"{below}/{upload['Key'].removeprefix(prefix).lstrip('/')}"
                if orphaned(name, (datetime.now(UTC) - upload["Initiated"]).total_seconds()):
                    self._call("abort_mpu", bucket, upload["Key"], upload["UploadId"])

    def _path(self, name: str) -> tuple[Any, str]:
        fs, root = file_system(self.url, self._tries)
        return fs, f"{root}/{name}" if name else root

    def _new_path(self, name: str) -> str:
        """Returns the path of a file to be written, after creating its folder."""
        fs, path = self._path(name)
        if not _is_s3(self.url):  # S3 keys need no folder, and makedirs could create a bucket
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def _progress(self, *_: object, **__: object) -> None:
        self._progressed_at = time.monotonic()

    def _call(self, method: str, *args: Any, limit_s: float | None = None, **options: Any) -> Any:
        """Calls a method of the file system. `limit_s`: without progress; None: that of a small request."""
        from fsspec.asyn import sync

        fs, _ = file_system(self.url, self._tries)
        if self._stop.is_set():
            raise TransferStopped
        if not fs.async_impl:
            return getattr(fs, method)(*args, **options)
        call = partial(getattr(fs, f"_{method}"), *args, **options)
        return sync(fs.loop, self._run_watched, call, limit_s or min(3 * _READ_S, time_left(3 * _READ_S)))

    async def _run_watched(self, call: Callable[[], Awaitable[T]], limit_s: float) -> T:
        import asyncio  # imported here: it takes 20 ms

        task = asyncio.ensure_future(call())
        self._progress()
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            stalled = time.monotonic() - self._progressed_at > limit_s
            if stalled or self._stop.is_set():
                task.cancel()
                await asyncio.wait({task}, timeout=_POLL_S)  # time to close its connection
                raise ConnectionError(f"no data moved for {limit_s:.0f} s") if stalled else TransferStopped
        return task.result()
