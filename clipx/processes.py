"""Processes of this machine, and those that clipx starts: their signals, their end, and its cause."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from clipx.compat import processes_of_pool
from clipx.escape import EscapedLogRecord

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@contextlib.contextmanager
def blocked_sigterm() -> Iterator[None]:
    """Blocks SIGTERM for this thread, and for all threads of the processes that it starts.

    A process that blocks it itself would be late: libraries start threads when they are imported, as wandb's.
    """
    if multiprocessing.get_start_method() != "fork":
        resource_tracker.ensure_running()  # its start unblocks SIGTERM for this thread, before Python 3.14
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_in_child() -> int:
    """Makes this process end when the one that started it ends, which is not the parent under a fork server.

    Returns the pid of that one. Also sets what only a fork inherits.
    """
    logging.setLogRecordFactory(EscapedLogRecord)
    starter = multiprocessing.parent_process()
    assert starter is not None and starter.pid is not None

    def wait() -> None:
        starter.join()
        os._exit(0)

    threading.Thread(target=wait, name="starter", daemon=True).start()
    return starter.pid


class Environment:
    """The environment of this process, which becomes that of the process, of a fork server, that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[dict[str, str]], Environment], tuple[dict[str, str]]]:
        return _adopt, (dict(os.environ),)


def _adopt(environment: dict[str, str]) -> Environment:
    os.environ.clear()
    os.environ.update(environment)
    return Environment()


# -------------------------------------------------------------------------------------------------------------- facts


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


# ------------------------------------------------------------------------------------------------------------- deaths


def how_ended(code: int) -> str:
    """Returns by what a process with this exit code of multiprocessing or subprocess ended: "by SIGKILL", "code 1"."""
    if code >= 0:
        return f"code {code}"
    with contextlib.suppress(ValueError):  # a real-time signal without a name
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


def why_ended(code: int, less_memory: str) -> str:
    """Returns the known cause of the death of a process, and what to do. `less_memory`: the fix for lack of memory.

    Memory is named only if the kernel has counted a kill for lack of it since `first_oom_kills` was called.
    """
    if -code == signal.SIGKILL:
        before, now = first_oom_kills(), oom_kills()
        if before is not None and now is not None and now > before:
            return f"the kernel killed {now - before} for lack of memory: {less_memory}, or give the job more memory"
        counted = "" if now is None else ", for the kernel counts no kill for lack of memory"
        return f"it was killed from outside{counted}: look in the logs of the kernel and of the scheduler"
    if -code in _CRASHES:
        return "a library crashed in it: PYTHONFAULTHANDLER=1 shows where"
    return "a signal from outside ended it" if code < 0 else "a library ended it: see its output above"


def processes_of(pool: ProcessPoolExecutor) -> Mapping[int, BaseProcess]:
    """Returns the processes of a pool by pid, for `first_death`: before it starts them."""
    first_oom_kills()
    processes: Mapping[int, BaseProcess] = processes_of_pool(pool)
    return processes


def first_death(processes: Mapping[int, BaseProcess], less_memory: str) -> str:
    """Returns which of the processes of a broken pool died first, by what and why: "died (pid 7, code 1): ...".

    Call it once the pool is shut down, which ends the others by SIGTERM.
    """
    dead = [process for process in processes.values() if process.exitcode]
    for process in sorted(dead, key=lambda process: process.exitcode == -signal.SIGTERM):
        code = process.exitcode or 0
        return f"died (pid {process.pid}, {how_ended(code)}): {why_ended(code, less_memory)}"
    return "died"


@cache
def first_oom_kills() -> int | None:
    """Returns `oom_kills` of the first call in this process."""
    return oom_kills()


def oom_kills(root: str = "/") -> int | None:
    """Returns how many processes of this memory control group, else of the machine, the kernel has killed for lack of
    memory, None if it does not tell. `root`: of /proc and /sys."""
    for folder, version in memory_groups(root):
        with contextlib.suppress(OSError, KeyError, ValueError):
            return numbers(folder / ("memory.events" if version == 2 else "memory.oom_control"))["oom_kill"]
    with contextlib.suppress(OSError, KeyError, ValueError):
        return numbers(Path(root, "proc/vmstat"))["oom_kill"]
    return None


def memory_groups(root: str = "/") -> Iterator[tuple[Path, int]]:
    """Yields the folder of the memory control group of this process and of those above it, each with its version."""
    with contextlib.suppress(OSError):
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mount = Path(root, "sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
            group = mount / path.lstrip("/")
            yield from ((folder, 1 if controllers else 2) for folder in (group, *group.parents))


def numbers(file: Path) -> dict[str, int]:
    """Returns the numbers of a file of the kernel with a name and a number in each line."""
    return {name: int(number) for name, number, *_ in map(str.split, file.read_text().splitlines())}
