"""A size-limited cache of whole shard files that the processes of a machine share; fsspec's have no limit."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.data.loader_process import this_process
from clipx.data.shards.index import RETRY_S, Span
from clipx.escape import print_stderr
from clipx.storage.failure import error_text
from clipx.storage.local import cache_folder, ensure_folder, open_own

if TYPE_CHECKING:
    from clipx.data.shards.shard import Shard

_USED_EVERY = 60.0  # seconds between updates of a cached file's time of last use
_CACHED_NAME = re.compile(r"[0-9a-f]{32}\.(tar|part)")
_PAUSE = 60.0  # seconds before the next attempt after a write to the cache failed
_ORPHAN_S = 86_400.0  # seconds without use after which a whole file without a limit of the cache is removed


@dataclass(frozen=True, slots=True)
class Access:
    """Retry and cache settings of remote files. Local files are read directly."""

    retry_s: float = RETRY_S  # total time in seconds for the retries of a read
    cache_bytes: int = 0  # size limit of the cache of whole files in bytes. 0 disables the cache
    cache_dir: str | None = None  # folder of the cache. None selects `shards` in the cache folder of clipx
    whole: bool = False
    """Whether a shard is stored in the cache before it is read. The cache may then exceed `cache_bytes`. With
    cache_bytes=0, a shard is removed when it is released."""

    @property
    def folder(self) -> Path:
        """The folder of the cache; created if missing. Raises ConfigError."""
        return _cache_dir(self.cache_dir)


@lru_cache(maxsize=8)
def _cache_dir(path: str | None) -> Path:
    if path is None:
        return cache_folder("shards")
    return ensure_folder(Path(path).expanduser(), f"data.cache_dir={path}", "give")


def read_cached(path: Path, span: Span) -> bytes | None:
    """Reads a span of a cached file. Returns None if the file is not in the cache."""
    try:
        with path.open("rb", buffering=0) as opened:  # closed at once: an open file that is evicted holds its space
            if time.time() - os.fstat(opened.fileno()).st_mtime > _USED_EVERY:
                with contextlib.suppress(OSError):
                    os.utime(path)  # least recently used files are evicted first
            return os.pread(opened.fileno(), span[1], span[0])
    except OSError:
        return None


def store_in_background(shard: Shard) -> None:
    """Fetches a shard into the cache in a thread, unless this process is fetching another one."""
    process = this_process()
    if process.caching.done():
        process.caching = process.whole_shards.submit(partial(store_now, shard, Exception))


def store_now(shard: Shard, tolerated: type[Exception] = OSError) -> None:
    """Fetches a shard into the cache. If that fails, prints the reason: its samples are read as byte ranges. Raises the
    errors of the storage, unless they are `tolerated`."""
    process, path = this_process(), shard.cache_path
    if path.exists() or time.monotonic() < process.cache_again_at:
        return
    try:
        store(shard)
    except tolerated as error:
        process.cache_again_at = time.monotonic() + _PAUSE
        print_stderr(f"{shard.url} cannot be stored in {path.parent}: {error_text(error)}; reading it by ranges")


def discard(shard: Shard) -> None:
    """Marks a shard as no longer used by this run: it is removed, or is the first one to be evicted."""
    with contextlib.suppress(OSError):
        if shard.access.cache_bytes:
            os.utime(shard.cache_path, (0, 0))
        else:
            shard.cache_path.unlink()


def store(shard: Shard) -> None:
    """Fetches a shard into the cache unless another process is fetching it. Raises DataError or OSError."""
    path = shard.cache_path
    part = path.with_suffix(".part")
    with open_own(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time frees space
        target = open_own(part, "ab")
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process that holds it ends
        except OSError:
            target.close()
            return
        if path.exists() or not _make_room(path.parent, part, shard.size, shard.access):
            part.unlink(missing_ok=True)
            target.close()
            return
        target.truncate(0)
        os.truncate(part, shard.size)  # reserves the space: other processes now count it
    with target, open_own(part, "r+b") as out:
        try:
            shard.write(out)
            out.truncate()  # the size of a row group is an estimate
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _make_room(folder: Path, part: Path, size: int, access: Access) -> bool:
    """Deletes the least recently used files, and partial files of killed processes. Returns whether `size` bytes fit
    now.

    Only files with names of the cache: the folder may hold others. Of whole files without a limit, those that were not
    used for a day: their run was killed. Open files remain readable.
    """
    files = {}
    for path in folder.iterdir():
        if _CACHED_NAME.fullmatch(path.name) and path != part:
            with contextlib.suppress(FileNotFoundError):  # another process has completed it meanwhile
                files[path] = path.stat()
    for path in [p for p in files if p.suffix == ".part"]:
        with contextlib.suppress(OSError), path.open("rb") as orphan:
            fcntl.flock(orphan, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            del files[path]
    held = sum(stat.st_size for stat in files.values())
    unused_since = time.time() - _ORPHAN_S if access.whole and not access.cache_bytes else math.inf
    for path in sorted((p for p in files if p.suffix == ".tar"), key=lambda p: files[p].st_mtime):
        if held + size <= access.cache_bytes or files[path].st_mtime > unused_since:
            break
        path.unlink(missing_ok=True)
        held -= files[path].st_size
    return access.whole or held + size <= access.cache_bytes
