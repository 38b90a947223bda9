"""Files at a path or a URL, and the text in them. Local ones are read directly; see remote.py for all others."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipx.errors import ClipxError, DataError, StorageRefused

# Of text as people, spreadsheets and editors write it: UTF-8, or UTF-16 with a byte order mark; any ends of lines.
_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """Returns the path of a local URL, with ~ expanded."""
    return os.path.expanduser(url.partition("://")[2] if "://" in url else url)  # noqa: PTH111


@contextmanager
def errors_as(
    error_type: type[ClipxError], what: str, fix: str, passing: type[Exception] = DataError
) -> Iterator[None]:
    """Replaces a storage's error with `error_type` and the text "what (reason): fix", or its own fix if it refuses all.

    Other DataErrors, whose message names the file, and `passing` are raised unchanged.
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


def decode(encoded: bytes, errors: str = "strict") -> str:
    r"""Returns a text with \n as ends of lines. Raises ValueError with the reason why the bytes are none.

    `errors`: see bytes.decode, for UTF-8.
    """
    encoding = _encoding(encoded)
    name = encoding.removesuffix("-sig").upper()
    try:
        text = encoded.decode(encoding, errors if name == "UTF-8" else "strict")
    except UnicodeDecodeError as error:
        line = encoded.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not {name}: save it as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"line {line} has a null character, as UTF-16 without a byte order mark: save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lines(encoded: bytes) -> list[str]:
    """Returns the lines of a text, without their ends. Raises ValueError as `decode`."""
    return decode(encoded).removesuffix("\n").split("\n")


def filled_lines(encoded: bytes) -> list[str]:
    """Returns the lines of a text without white space at their ends, and without blank ones. Raises as `decode`."""
    return [line for line in map(str.strip, lines(encoded)) if line]


def open_lines(file: io.BufferedReader) -> io.TextIOWrapper:
    """Returns the text of a file, to be read by the lines that `lines` returns. Reading raises UnicodeError."""
    return io.TextIOWrapper(file, _encoding(file.peek(4)[:4]), newline=None)


def _encoding(start: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), "utf-8-sig")
