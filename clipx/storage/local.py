"""Local folders and files: cache folder, folder creation, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from clipx.errors import ConfigError, DataError, disk_error

_FIX = "make room, or set CLIPX_CACHE to another folder"


def cache_folder(name: str) -> Path:
    """Creates and returns a folder in CLIPX_CACHE, by default ~/.cache/clipx (XDG_CACHE_HOME). Raises ConfigError."""
    folder = _cache_root() / name
    return ensure_folder(folder, f"the cache folder {folder}", "set CLIPX_CACHE to")


def ensure_folder(folder: Path, named: str, fix: str) -> Path:
    """Creates a folder if it is missing and returns it. Raises ConfigError, with `fix`, e.g. `set KEY to`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named} cannot be created ({error.strerror}): {fix} a writable folder") from None
    return folder


def check_folder(folder: Path, named: str, fix: str) -> None:
    """Raises the error of `ensure_folder` if a folder cannot be created or written. Creates nothing."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        number = errno.ENOTDIR if not nearest.is_dir() else 0 if os.access(nearest, os.W_OK | os.X_OK) else errno.EACCES
    except OSError as error:
        number = error.errno or errno.EIO
    if number:
        raise ConfigError(f"{named} cannot be created ({os.strerror(number)}): {fix} a writable folder")


def check_file(path: Path) -> None:
    """Raises the OSError that reading a file raises if it does not exist, or is a folder. Opens nothing."""
    if stat.S_ISDIR(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _cache_root() -> Path:
    try:
        if root := os.environ.get("CLIPX_CACHE"):
            return Path(root).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipx"
    except RuntimeError:  # of a user without a home directory, or an unknown one: ~nouser/cache
        raise ConfigError(
            "the cache folder is in a home directory that is not known: set CLIPX_CACHE to a folder"
        ) from None


def write_atomically(path: Path, write: Callable[[str], object], fix: str = _FIX) -> None:
    """Calls `write` with a temporary path and renames that file when it is complete. Raises DiskError.

    A file named `path` is therefore complete, also after a power cut, and a link of that name is replaced, not
    followed. `write` opens with mode x: a file that it opens is then new.
    """
    partial_path = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    try:
        write(str(partial_path))
        sync(partial_path)
        partial_path.replace(path)
    except OSError as error:
        raise disk_error(error, path, fix) from None
    finally:
        with contextlib.suppress(OSError):
            partial_path.unlink(missing_ok=True)


def remove_partial(folder: Path, name: str = "*") -> None:
    """Removes what killed processes have left of `write_atomically` to files of this name, a pattern.

    Only a process that has locked the folder may call it. Raises OSError.
    """
    for path in folder.glob(f".{name}.*"):
        if re.fullmatch(r".+\.[0-9a-f]{12}", path.name):
            path.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, fix: str = _FIX) -> None:
    """Writes a file by `write_atomically`. Raises DiskError."""
    write_atomically(path, writing(content), fix)


def writing(content: bytes, mode: int = 0o666) -> Callable[[str], None]:
    """Returns a function for `write_atomically` that writes these bytes, to a file of these permissions less umask."""

    def write(partial: str) -> None:
        with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            file.write(content)

    return write


def write_text(path: Path, text: str, fix: str = _FIX, private: bool = False) -> None:
    """Writes a text as UTF-8 by `write_atomically`, with `private` for this user alone. Raises DiskError."""
    write_atomically(path, writing(text.encode(), 0o600 if private else 0o666), fix)


def sync(path: Path) -> None:
    """Flushes a file or folder to disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_own(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Opens a file that clipx writes in place, such as a log. `options`: those of `open`.

    Raises OSError for what another user may have put there: a link to a file of this user, a named pipe.
    """
    return open(path, mode, opener=_open_regular, **options)  # Path.open has no opener


def _open_regular(path: str, flags: int) -> int:
    check_regular(Path(path))  # before it is opened, for a clear error; another file may take its place until then
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return fd


def check_regular(path: Path) -> None:
    """Raises OSError for a link, a named pipe and all else that is neither missing nor a regular file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "it is a link" if stat.S_ISLNK(mode) else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))


def acquire_lock(lock: IO[Any], named: str) -> None:
    """Locks a folder for one writing process until the lock file is closed. Raises DataError if it is locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(f"{named} is being written by another process: wait for it, or give another folder") from None
