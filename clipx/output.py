"""Standard output and standard error of a process, which may be full, closed, or non-blocking.

What a run prints is never worth the run: `lose_output` discards what cannot be written. Other commands print their
result: they end with one line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import TextIO, cast

from clipx.errors import OutputClosed, OutputError

_ERRORS = "backslashreplace"  # escapes what the encoding cannot represent
_loses = False
_told = False


def open_output(loses: bool = False) -> None:
    """Opens the standard streams of a command. The first call of a process precedes all other files.

    A closed descriptor would be given to the next file, into which other code then prints; it becomes the null device,
    which cannot be written either. `loses`: as after `lose_output`.
    """
    global _loses, _told
    _loses, _told = loses, False
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY), True)  # lowest free number
    sys.stdout, sys.stderr = _opened(sys.stdout, 1), _opened(sys.stderr, 2)


def lose_output() -> None:
    """Discards from now on what standard output does not take, and says so once on standard error."""
    global _loses
    _loses = True
    sys.stdout = _opened(sys.stdout, 1)


def flush_output() -> None:
    """Flushes the standard streams before the process ends at once."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, OutputError):
            stream.flush()


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """Returns a stream on a descriptor that waits, and raises OutputError or discards. Others, as in tests, remain."""
    line_buffered = number == 2
    if stream is not None:
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # without a buffer: python -u
        if type(raw) is not io.FileIO or raw.closed or raw.fileno() != number:
            if type(stream) is io.TextIOWrapper and number == 1 and type(raw) is not _Stream:
                stream.reconfigure(errors=_ERRORS)
            return stream
        with contextlib.suppress(OSError):
            stream.flush()
        line_buffered = line_buffered or getattr(stream, "line_buffering", False) or buffer is raw
    encoding = "utf-8" if stream is None else stream.encoding
    opened = io.BufferedWriter(cast("io.RawIOBase", _Stream(number, "w", closefd=False)))
    return io.TextIOWrapper(opened, encoding, _ERRORS, line_buffering=line_buffered)


class _Stream(io.FileIO):
    """Descriptor of standard output or error."""

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        """Writes all bytes, or discards them. Raises OutputError."""
        left = memoryview(data).cast("B")
        try:
            while left:
                written = super().write(left)
                if written is None:  # non-blocking, as another program that shares a terminal or pipe may set it
                    select.select([], [self], [])
                left = left[written or 0 :]
        except OSError as error:
            if self.fileno() == 1:
                _fail(error)
        return memoryview(data).nbytes


def _fail(error: OSError) -> None:
    """Raises OutputError, once; what is printed later is discarded. Prints a line instead where output may be lost."""
    global _loses, _told
    text = f"standard output cannot be written ({error.strerror})"
    closed, first = error.errno == errno.EPIPE, not _told
    _told = True
    if not _loses:
        _loses = True
        raise OutputClosed if closed else OutputError(f"{text}: write it to another file or pipe")
    if first and not closed:
        print(f"warning: {text}: the command goes on, and discards what it prints there", file=sys.stderr, flush=True)
