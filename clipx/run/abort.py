"""Immediate end of a process, from any thread, with its reason."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NoReturn

WRITE_S = 10.0  # time limit for the reporters: the file system may hang

_reporters: list[Callable[[str, int], None]] = []


def add_reporter(reporter: Callable[[str, int], None]) -> None:
    """Adds a function that `abort` calls with the reason and the exit code, for example to write a result."""
    _reporters.append(reporter)


def abort(reason: str, code: int, write: Callable[[], None] = lambda: None) -> NoReturn:
    """Prints the reason as an error, calls `write` and the reporters for at most 10 s, and ends the process.

    For a main thread that may be blocked: nothing is unwound, so that a checkpoint that is being written stays
    incomplete and is ignored.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"error: {reason}\n".encode(errors="backslashreplace"))  # not print: its lock may be held

    def report() -> None:
        for call in (write, *(lambda own=reporter: own(reason, code) for reporter in _reporters)):
            with contextlib.suppress(OSError):
                call()

    writer = threading.Thread(target=report, daemon=True)
    writer.start()
    writer.join(WRITE_S)
    os._exit(code)
