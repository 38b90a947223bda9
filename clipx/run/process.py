"""Facts about processes of this machine, from /proc. Without it all are empty."""

from __future__ import annotations

from pathlib import Path


def process_stat(pid: int) -> tuple[str, str]:
    """Returns a process's state and start time in kernel ticks, or ("", "")."""
    fields = _stat(pid)
    return (fields[0], fields[19]) if fields else ("", "")


def parent_of(pid: int) -> int:
    """Returns the pid of a process's parent, or 0."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def environment_of(pid: int) -> list[str]:
    """Returns the variables with which a process was started, as NAME=VALUE. Empty for a process of another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    try:
        # The command name, in parentheses before these fields, may contain any character.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
