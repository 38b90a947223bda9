"""The immediate end of this process with its reason, from any thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from clipx.escape import escaped
from clipx.output import flush_output

WRITE_S = 10.0  # time limit for the reporters: the file system may hang

Reporter = Callable[[str, int], None]  # called with the reason and the exit code
_reporters: list[Reporter] = []
_first = threading.Lock()

ENDING = threading.Event()
"""Set when this process ends because of another, or looks for the rank that it lost: a signal changes nothing then."""


def write_line(line: str) -> None:
    """Writes a line to stderr without the lock of print, which a signal or a blocked thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def add_reporter(reporter: Reporter) -> None:
    """Adds a function that `abort` calls, for example to write a result."""
    _reporters.append(reporter)


def abort(reason: str, code: int, *reporters: Reporter, rank: int | None = None) -> NoReturn:
    """Prints the reason as an error, calls these and the added reporters for at most 10 s, and ends the process.

    For any thread, while the main one may be blocked: nothing is unwound, so that a checkpoint that is being written
    stays incomplete and is ignored. Of several calls the first one ends the process; the others wait for that.
    """
    ENDING.set()
    _first.acquire()
    write_line(f"error{'' if rank is None else f' (rank {rank})'}: {escaped(reason)}")

    def report() -> None:
        for reporter in (*reporters, *_reporters, lambda *_: flush_output()):
            with contextlib.suppress(Exception):  # of any library that writes
                reporter(reason, code)

    writer = threading.Thread(target=report, daemon=True)
    with contextlib.suppress(RuntimeError):  # no further thread can be started
        writer.start()
        writer.join(WRITE_S)
    os._exit(code)
