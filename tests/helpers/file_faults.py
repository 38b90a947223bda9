"""Faults of a disk: a call of the system on a file of one folder fails or is the last, whichever library makes it.

A library that `forks` preloads counts the calls that a process and its forks make on the files of a folder: `Call`s
that change the folder (create, write, fsync, rename, unlink, …) and those that read it (open, read, stat, list, …).

    calls = count(folder, ["-m", "clipx.train", …])                       # one healthy pass; its calls in order
    done = run(folder, [...], Fault(3, errno.ENOSPC))                    # the fourth change fails
    done = run(folder, [...], Fault(3, errno.ENOSPC, lasting=True))      # and all after it: a write writes its half first
    done = run(folder, [...], Fault(3, errno.EIO, kind=READS))           # the fourth read fails
    done = run(folder, [...], Fault(3, None))                            # SIGKILL at the fourth change; half of a write
    done.returncode, done.stdout, done.stderr

A start takes 0.1 s and its own work. Threads may make their calls in another order in the next pass: choose a call by
its number, and do not rely on which it is. `environment` gives the variable for a process started in another way.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from helpers.debian import INSTALL

VARIABLE = "FILE_FAULT"
READS, CHANGES = 1, 2
READ_NAMES = frozenset({"open", "read", "map", "list", "stat", "access"})
_NEVER = 1 << 40


class Call(NamedTuple):
    """A call of the system: its name, such as `rename`, and the path below the folder, of a rename the new one."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Call `number`, counted from 0 among those of a kind, fails with an errno, or kills the process with None.

    lasting: all later ones fail as well, as on a disk that is full or was lost.
    """

    number: int
    error: int | None
    lasting: bool = False
    kind: int = CHANGES


@functools.cache
def library() -> Path | None:
    """Compiles the library that `forks` preloads. Returns None without a compiler."""
    if shutil.which("gcc") is None:
        return None
    out = Path(mkdtemp(prefix="file-faults-"), "file_faults.so")
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(out), str(source), "-ldl"], check=True)
    return out


def environment(folder: Path, log: Path, fault: Fault | None, kind: int = CHANGES) -> dict[str, str]:
    """Returns the variable that `forks` arms the library with. Calls are logged to the file `log`, outside `folder`."""
    assert library() is not None, f"gcc is missing: {INSTALL}"
    fault = fault or Fault(_NEVER, None, kind=kind)
    last = _NEVER if fault.lasting else fault.number
    values = (folder.resolve(), log, fault.kind, fault.number, last, fault.error or 0)
    return {VARIABLE: "\t".join(map(str, values))}


def arm(text: str) -> None:
    """Arms the library in this process, by the value of `VARIABLE`."""
    import ctypes

    ctypes.CDLL(None).file_faults_arm(os.fsencode(text))


def read_calls(log: Path) -> list[Call]:
    """Returns the calls that were logged until now."""
    lines = log.read_bytes().decode(errors="replace").splitlines() if log.exists() else []
    return [Call(*line.split("\t", 1)) for line in lines]


def count(folder: Path, words: Sequence[str], kind: int = CHANGES, env: Mapping[str, str] | None = None) -> list[Call]:
    """Runs `python WORDS…` without a fault. Returns its calls of a kind on the files of `folder`, in order."""
    log = Path(mkdtemp(prefix="file-faults-"), "calls")
    done = _run(words, environment(folder, log, None, kind), env, 120)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    calls = read_calls(log)
    shutil.rmtree(log.parent)
    return calls


def run(
    folder: Path, words: Sequence[str], fault: Fault | None, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS…` with a fault, or without. Raises TimeoutExpired."""
    log = Path(mkdtemp(prefix="file-faults-"), "calls")
    try:
        return _run(words, environment(folder, log, fault), env, timeout)
    finally:
        shutil.rmtree(log.parent)


def _run(
    words: Sequence[str], fault: Mapping[str, str], env: Mapping[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    from helpers import CODE, forks

    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CODE, **(env or {})}
    return forks.run([fault], words, own, timeout)
