"""Facts about processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


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
