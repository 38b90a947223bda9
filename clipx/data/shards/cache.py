"""The files that shards are read from, and a cache of whole ones, with a limit, that a machine's processes share.

fsspec's `filecache` and `simplecache` grow without end, and each process fetches for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from clipx.errors import DataError, require
from clipx.storage.local import cache_folder, ensure_folder
from clipx.storage.remote import BLOCK, error_text, is_local, read_range

Span = tuple[int, int]
"""(first byte, number of bytes)"""

_USED_EVERY = 60.0  # seconds: often enough to note that a file was used
_CACHED_NAME = re.compile(r"[0-9a-f]{32}\.(tar|part)")
_PAUSE = 60.0  # seconds until the cache is tried again where it could not be written


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
    return ensure_folder(Path(path).expanduser(), f"data.cache_dir={path}", "give")


def check_access(retry_s: float, cache_gb: float) -> None:
    require(retry_s >= 0, f"data.retry_s={retry_s} is negative: give 0, to try once, or more seconds")
    require(cache_gb >= 0, f"data.cache_gb={cache_gb} is negative: give 0, for no cache, or its limit in GB")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file that spans are read from. `version` is its index's name: another one is another content."""

    url: str
    version: str
    size: int
    access: Access

    @property
    def local(self) -> bool:
        return is_local(self.url)

    @property
    def cacheable(self) -> bool:
        return 0 < self.size <= self.access.cache_bytes

    @property
    def cache_path(self) -> Path:
        """In the cache, whether it is there or not."""
        return self.access.folder / f"{self.version}.tar"


def read_cached(file: ShardFile, span: Span) -> bytes | None:
    """None where the file is not in the cache: then samples come by ranges while a thread fetches it whole.

    So nothing waits for a whole file, and a cache that is full or fails costs speed only.
    """
    path = file.cache_path
    try:
        with path.open("rb", buffering=0) as opened:  # not kept open: what is evicted must free its space
            if time.time() - os.fstat(opened.fileno()).st_mtime > _USED_EVERY:
                with contextlib.suppress(OSError):
                    os.utime(path)  # for the eviction
            return os.pread(opened.fileno(), span[1], span[0])
    except OSError:
        _store_in_background(file)
        return None


class _Background:
    """A process fetches one whole file at a time, in a thread. Threads do not survive a fork, hence one for each."""

    def __init__(self) -> None:
        self.fetching = threading.Lock()
        self.not_before = 0.0  # time of the next try, after one failed


@lru_cache(maxsize=1)
def _background(_process: int) -> _Background:
    return _Background()


def _store_in_background(file: ShardFile) -> None:
    background = _background(os.getpid())
    if time.monotonic() < background.not_before or not background.fetching.acquire(blocking=False):
        return

    def run() -> None:
        try:
            store(file)
        except (DataError, OSError) as error:
            background.not_before = time.monotonic() + _PAUSE
            print(f"{file.url} is not cached: {error_text(error)}", file=sys.stderr)
        finally:
            background.fetching.release()

    threading.Thread(target=run, daemon=True, name="clipx-cache").start()


def store(file: ShardFile) -> None:
    """Fetches a file into the cache, unless another process does. It has its name when it is whole."""
    path = file.cache_path
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


def _make_room(folder: Path, part: Path, size: int, limit: int) -> bool:
    """Deletes the files used longest ago, and those that a killed process left. Open files stay readable.

    Only files with names that the cache gives are deleted: its folder may hold others' shards.
    """
    files = {p: p.stat() for p in folder.iterdir() if _CACHED_NAME.fullmatch(p.name) and p != part}
    for path in [p for p in files if p.suffix == ".part"]:
        with path.open("rb") as orphan, contextlib.suppress(OSError):
            fcntl.flock(orphan, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            del files[path]
    held = sum(stat.st_size for stat in files.values())
    for path in sorted((p for p in files if p.suffix == ".tar"), key=lambda p: files[p].st_mtime):
        if held + size <= limit:
            break
        path.unlink(missing_ok=True)
        held -= files[path].st_size
    return held + size <= limit
