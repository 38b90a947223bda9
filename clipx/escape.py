"""Escapes names and messages where they are printed or written: a name may hold any byte, newlines included."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any, TextIO

_LARGE = 1_000_000_000  # bytes
_BYTE = 0xDC00  # what Python adds to a byte of a file name that is not UTF-8 (PEP 383)
_LONGEST = 2_000  # characters of a message


def escaped(text: str, keep: str = "") -> str:
    """Returns a text as one line of printable characters. The rest is escaped as by `repr`: \\n, \\x1b, \\u202e.

    A byte of a name that is not UTF-8 becomes \\xe9. `keep`: characters that are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def is_text(text: str) -> bool:
    """Returns whether a text can be saved in any file: without NUL and halves of surrogate pairs."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def json_text(value: Any, **options: Any) -> str:
    """Returns the JSON text of a value in printable characters. `options`: those of `json.dumps`.

    Half a surrogate pair, which UTF-8 cannot represent, is escaped as by `escaped`; all else is read back unchanged.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape_in_json(c) for c in text)


def shortened(text: str) -> str:
    """Returns a message without the middle of words of more than 500 characters, and with at most 2,000 in total."""
    text = re.sub(r"\S{501,}", lambda word: f"{word[0][:200]}…{word[0][-100:]}", text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 + 1 :]}"


def print_stderr(text: str) -> None:
    """Prints a line on stderr, escaped."""
    print(escaped(text), file=sys.stderr, flush=True)


def announce(what: str, size: int) -> None:
    """Prints on stderr that `size` bytes are read or written at once, if there are more than a second takes."""
    if size >= _LARGE:
        print_stderr(f"{what}: {size / 1e9:,.1f} GB")


class EscapedLogRecord(logging.LogRecord):
    """Log record with an escaped message, whichever handler prints it. Other packages may log several lines."""

    def getMessage(self) -> str:
        return escaped(super().getMessage(), "" if self.name.partition(".")[0] == "clipx" else "\n\t")


class StderrHandler(logging.StreamHandler[TextIO]):
    """Prints log lines on standard error, as it is at that time: a live bar may have put another stream there."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _escape(character: str) -> str:
    code = ord(character)
    if _BYTE + 0x80 <= code <= _BYTE + 0xFF:
        return f"\\x{code - _BYTE:02x}"
    return character.encode("unicode_escape").decode()


def _escape_in_json(character: str) -> str:
    if "\ud800" <= character <= "\udfff":
        return "\\" + _escape(character)
    return json.dumps(character)[1:-1]
