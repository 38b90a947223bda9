"""Files at a path or a URL. Local ones are read directly; see remote.py for all others."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipx.errors import ClipxError, DataError, StorageRefused


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """Returns the path of a local URL, with ~ expanded."""
    return os.path.expanduser(url.partition("://")[2] if "://" in url else url)  # noqa: PTH111


@contextmanager
def errors_as(
    error_type: type[ClipxError], what: str, fix: str, passing: type[Exception] = DataError
) -> Iterator[None]:
    """Replaces a storage's error with `error_type` and the text "what (reason): fix".

    A storage that refuses all requests has a specific fix. Other DataErrors, whose message names the file, and
    `passing` are raised unchanged.
    """
    try:
        yield
    except StorageRefused as refused:
        raise error_type(f"{what} ({refused.reason}): {refused.fix}") from None
    except (DataError, passing):
        raise
    except Exception as error:  # a remote file system raises errors of its library
        from clipx.storage.failure import error_text

        raise error_type(f"{what} ({error_text(error)}): {fix}") from None


def read_file(url: str, retry_s: float) -> bytes:
    """Reads a small file, such as a list. Raises the file system's errors, or StorageError for an outage."""
    if is_local(url):
        return _absolute(url).read_bytes()
    from clipx.storage.remote import read_remote

    return read_remote(url, retry_s)


def file_info(url: str, retry_s: float, patient: bool = False) -> dict[str, Any]:
    """Returns facts on a file under fsspec's names: its type, its size, and what changes with its content.

    `patient`: see `retry` of remote.py. Raises as `read_file`.
    """
    if is_local(url):
        found = _absolute(url).stat()
        is_folder = stat.S_ISDIR(found.st_mode)
        return {"type": "directory" if is_folder else "file", "size": found.st_size, "mtime": found.st_mtime}
    from clipx.storage.remote import remote_info

    return remote_info(url, retry_s, patient)


def _absolute(url: str) -> Path:
    return Path(local_path(url)).absolute()
