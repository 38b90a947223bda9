"""Facts about processes of this machine, and the immediate end of this one with its reason."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

WRITE_S = 10.0  # time limit for the reporters: the file system may hang

Reporter = Callable[[str, int], None]  # called with the reason and the exit code
_reporters: list[Reporter] = []


class Process(NamedTuple):
    """State, parent's pid and start time in kernel ticks of a process. Empty if it is gone, or without /proc."""

    state: str = ""
    parent: int = 0
    born: str = ""


def process_stat(pid: int) -> Process:
    """Reads the facts about a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return Process()
    fields = text.rpartition(")")[2].split()  # after the command's name, which may contain any character
    return Process(fields[0], int(fields[1]), fields[19])


def is_running(pid: int, born: str) -> bool:
    """Returns whether the process that was started at `born` runs, rather than a later one with the same pid."""
    now = process_stat(pid)  # first: a process that has ended since then is not found below
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # a process of another user
    return now.state not in ("Z", "X") and now.born in (born, "")


def write_line(line: str) -> None:
    """Writes a line to stderr without the lock of print, which a signal or a blocked thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def add_reporter(reporter: Reporter) -> None:
    """Adds a function that `abort` calls, for example to write a result."""
    _reporters.append(reporter)


def abort(reason: str, code: int, *reporters: Reporter) -> NoReturn:
    """Prints the reason as an error, calls these and the added reporters for at most 10 s, and ends the process.

    For any thread, while the main one may be blocked: nothing is unwound, so that a checkpoint that is being written
    stays incomplete and is ignored.
    """
    write_line(f"error: {reason}")

    def report() -> None:
        for reporter in (*reporters, *_reporters):
            with contextlib.suppress(OSError):
                reporter(reason, code)

    writer = threading.Thread(target=report, daemon=True)
    writer.start()
    writer.join(WRITE_S)
    os._exit(code)
