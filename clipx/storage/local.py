"""Folders and files of this machine: the cache folder, atomic writes, creation with clear errors."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from clipx.errors import ConfigError, DataError

_FIX = "make room, or set CLIPX_CACHE to another folder"


def cache_folder(name: str) -> Path:
    """Returns a folder of the cache: of CLIPX_CACHE, else clipx in the user's cache folder. Raises ConfigError."""
    folder = _cache_root() / name
    return ensure_folder(folder, f"the cache folder {folder}", "set CLIPX_CACHE to")


def ensure_folder(folder: Path, named: str, fix: str) -> Path:
    """Creates a folder where it is missing, and returns it. Raises ConfigError, with `fix` for choosing another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named} cannot be made ({error.strerror}): {fix} a folder you can write") from None
    return folder


def _cache_root() -> Path:
    if root := os.environ.get("CLIPX_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clipx"


def write_atomically(path: Path, write: Callable[[str], object], fix: str = _FIX) -> None:
    """Calls `write` with a temporary path and renames that file when it is complete.

    So a file of this name is a complete one. Processes that write it at the same time do the same work twice.
    """
    partial_path = path.with_name(f".{path.name}.{uuid4().hex[:12]}")
    try:
        write(str(partial_path))
        partial_path.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}): {fix}") from None
    finally:
        partial_path.unlink(missing_ok=True)


def acquire_lock(lock: TextIO, named: str) -> None:
    """Acquires the lock file of a folder that one process at a time writes to, until it is closed. Raises DataError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(f"{named} is being written by another process: wait for it, or give another folder") from None
