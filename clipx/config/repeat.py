"""Command line that repeats a run, for the records of the run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from clipx.storage.url import redacted

_command: ContextVar[str | None] = ContextVar("command", default=None)


def record_command(command: str, overrides: Sequence[str], folders: Sequence[str | Path] = ()) -> None:
    """Records what runs now: the command, such as `train`, its overrides, and the folders of --config-dir."""
    options = [word for folder in folders for word in ("--config-dir", str(folder))]
    _command.set(redacted(shlex.join([*_program(), f"clipx.{command}", *options, *overrides])))


def repeat_command() -> str | None:
    """Returns the recorded command line, quoted for a shell. None in a process that no command of clipx started."""
    return _command.get()


def _program() -> list[str]:
    """Returns `python -m`, or under torchrun its command with the number of nodes and of processes of each."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python", "-m"]
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = [] if world == local else [f"--nnodes={world // local}"]
    return ["torchrun", *nodes, f"--nproc-per-node={local}", "-m"]
