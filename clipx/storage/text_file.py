"""Text as people, spreadsheets and editors write it: UTF-8, or UTF-16 with a byte order mark; any ends of lines."""

from __future__ import annotations

import io

_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


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
