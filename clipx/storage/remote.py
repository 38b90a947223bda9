"""Files anywhere: any URL of fsspec, with sane time-outs, retries, and uploads that end whole or not at all.

fsspec has the file systems. What it does not have is one bounded time for all retries: s3fs retries time-outs and
botocore 5xx, each by a count, and a silent server costs 413 s with their defaults. So both are told to try once, and
`retry` repeats a call until the caller's `retry_s` is over.
"""

from __future__ import annotations

import errno
import math
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clipx.errors import ClipxError, DataError, StorageError
from clipx.storage.url import redacted

T = TypeVar("T")

BLOCK = 16 << 20  # bytes a request where a file is read from front to end
REQUESTS = 32  # at a time and process: a remote read waits for some 50 ms and computes nothing
_CONNECT_S, _READ_S = 5, 20  # of S3: longer silence is an error, which is retried
_SINGLE_ATTEMPT = {"total_max_attempts": 1}
_PART = 16 << 20  # bytes of a part of an upload to S3, of which s3fs holds and sends ten at once
# In which no part got through: aiohttp has no limit for a server that stops reading. Half a MB/s will do.
_STALL_S = 300.0
_PARALLEL_BLOCKS = 8  # blocks of a download
_POLL_S = 0.1  # between looks whether to stop
_DELAY_S = (0.1, 10.0)  # before the second try, and at most
_WARN_AFTER_S, _WARN_EVERY_S = 10.0, 60.0  # seconds of failing before a line on stderr, and between lines
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, ImportError)
_FINAL_ERRNO = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", errno.ENOENT)}
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
_JITTER = random.SystemRandom()  # never the seeded one, whose draws belong to the samples
_warned = -math.inf  # when this process last wrote to stderr


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """Of a URL that is local."""
    return os.path.expanduser(url.partition("://")[2] if "://" in url else url)  # noqa: PTH111


def file_system(url: str, tries: int = 1) -> tuple[Any, str]:
    """fsspec's (file system, path). Kept by fsspec for each process, and made anew after a fork.

    What the user says of S3 in fsspec's own configuration (FSSPEC_S3_…, ~/.config/fsspec) and in AWS_… holds. `tries`:
    of a request to S3, for callers without a retry of their own.
    """
    import fsspec

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


# -------------------------------------------------------------------------------------------------- trying again


def backoff(first: float, most: float) -> Iterator[float]:
    """Yields the seconds before each retry: doubled, up to `most`, and jittered, because ranks fail together."""
    delay = first
    while True:
        yield delay * _JITTER.uniform(0.5, 1)
        delay = min(2 * delay, most)


def retry(url: str, retry_s: float, call: Callable[[], T]) -> T:
    """Returns `call()`, retried with growing, jittered pauses while the storage fails in a way that may pass.

    Other errors (no such file, no permission) are raised as they are, and an outage of `retry_s` as StorageError.
    """
    start = time.monotonic()
    for pause in backoff(*_DELAY_S):
        try:
            return call()
        except Exception as error:  # a remote file system raises what its library does
            if is_local(url) or is_final(error):
                raise
            spent = time.monotonic() - start
            if spent + pause > retry_s:
                raise StorageError(
                    f"{url} cannot be read: for {spent:.0f} s the storage failed ({error_text(error)}); check it and "
                    f"the network, or try longer than retry_s={retry_s:g}"
                ) from None
            if spent > _WARN_AFTER_S:
                _warn(f"{url}: the storage fails ({error_text(error)}); trying for {retry_s - spent:.0f} s more")
        time.sleep(pause)
    raise AssertionError  # the pauses never end


def _warn(text: str) -> None:
    """Prints on stderr, once a minute and process: many reads fail together."""
    global _warned
    if time.monotonic() - _warned > _WARN_EVERY_S:
        _warned = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def is_final(error: Exception) -> bool:
    """Whether the same request would fail again: nothing there, not allowed, not understood."""
    if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
        return True
    if isinstance(error, OSError) and error.errno in _FINAL_ERRNO:
        return True
    status = vars(error).get("status", vars(error).get("code"))  # of HTTP, as aiohttp and gcsfs name it
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429)


@contextmanager
def errors_as(error_of: Callable[[str], ClipxError], passing: type[Exception] = DataError) -> Iterator[None]:
    """Raises `error_of` the text in place of a storage's error.

    DataError, which names the file by itself, and `passing` are raised as they are.
    """
    try:
        yield
    except (DataError, passing):
        raise
    except Exception as error:  # a remote file system raises what its library does
        raise error_of(error_text(error)) from None


def error_text(error: BaseException) -> str:
    """Returns a library's error as one line, without secrets of the URLs in it."""
    return redacted(" ".join(str(error).split()))[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------------------- reading


def read_file(url: str, retry_s: float) -> bytes:
    """Reads a small file, such as a list. Raises what the file system does, or StorageError for an outage."""
    return _read(url, retry_s)


def read_range(url: str, start: int, end: int, retry_s: float) -> bytes:
    """Reads a range of bytes, fewer where the file ends before. Raises what the file system does, or DataError."""
    content = _read(url, retry_s, start=start, end=end)
    if len(content) > end - start:
        raise DataError(f"{url}: its server sends the whole file where a part is asked for: use one that knows ranges")
    return content


def _read(url: str, retry_s: float, **span: int) -> bytes:
    def call() -> bytes:
        fs, path = file_system(url)
        content: bytes = fs.cat_file(path, **span)
        return content

    return retry(url, retry_s, call)


def download(url: str, path: Path, size: int, retry_s: float) -> None:
    """Copies a file of `size` bytes into a new local one, several blocks at once, and retries each by itself.

    Raises what the file systems do, or StorageError for an outage of `retry_s`. A shorter file comes out shorter.
    """
    starts = range(0, size, BLOCK)
    with path.open("xb") as out:
        for group in (starts[i : i + _PARALLEL_BLOCKS] for i in range(0, len(starts), _PARALLEL_BLOCKS)):
            blocks: dict[int, bytes] = {}

            def call(group: range = group, blocks: dict[int, bytes] = blocks) -> None:
                fs, path = file_system(url)
                missing = [start for start in group if start not in blocks]
                ends = [min(start + BLOCK, size) for start in missing]
                found = fs.cat_ranges([path] * len(missing), missing, ends, on_error="return")
                blocks.update((k, v) for k, v in zip(missing, found, strict=True) if isinstance(v, bytes))
                for error in found:
                    if isinstance(error, BaseException):
                        raise error

            retry(url, retry_s, call)
            out.writelines(blocks[start] for start in group)


# ------------------------------------------------------------------------------------------------------- a folder


class TransferStopped(Exception):
    """A transfer was cancelled by the `stop` of its folder."""


class StorageFolder:
    """The files under a URL, for one thread. Names of files are relative to it.

    On file systems that are asynchronous, as those of the object stores are, a call ends soon after `stop` is set, with
    TransferStopped, and where nothing moves for minutes, with ConnectionError. Else methods raise what the file system
    does.
    """

    def __init__(self, url: str, stop: threading.Event | None = None, tries: int = 1) -> None:
        self.url, self._tries = url.rstrip("/"), tries
        self._stop = stop or threading.Event()
        self._progressed_at = 0.0

    def files(self, below: str = "") -> dict[str, int]:
        """Returns the size of each file under a name; none where there is nothing of that name."""
        fs, path = self._path(below)
        _, root = self._path("")
        fs.invalidate_cache()
        found = self._call("find", path, detail=True)
        return {path[len(root) + 1 :]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def read(self, name: str) -> bytes:
        content: bytes = self._call("cat_file", self._path(name)[1])
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""
        self._call("pipe_file", self._new_path(name), content)

    def put(self, path: Path, name: str) -> None:
        """Uploads a local file, in parts where it is large. An object store shows it when it is complete.

        Never through a file opened for writing: an exception would complete the object as far as it was written.
        """
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
        """Aborts multipart uploads that `orphaned(name, seconds)` says are abandoned: S3 keeps, and bills, them.

        Other storages drop theirs. Where this is not allowed, it is left to a lifecycle rule of the bucket.
        """
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
        if not _is_s3(self.url):  # whose keys need none, and where it could make a bucket
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
        return sync(fs.loop, self._run_watched, call, limit_s or 3 * _READ_S)

    async def _run_watched(self, call: Callable[[], Awaitable[T]], limit_s: float) -> T:
        import asyncio  # 20 ms of every start

        task = asyncio.ensure_future(call())
        self._progress()
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            stalled = time.monotonic() - self._progressed_at > limit_s
            if stalled or self._stop.is_set():
                task.cancel()
                await asyncio.wait({task}, timeout=_POLL_S)  # in which it closes its connection
                raise ConnectionError(f"nothing moved for {limit_s:.0f} s") if stalled else TransferStopped
        return task.result()
