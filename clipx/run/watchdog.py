"""Threads that end this process where nothing else would: it stalls, or its launcher is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from clipx.abort import WRITE_S, abort
from clipx.errors import Exit, PeerLost
from clipx.processes import is_running, process_stat
from clipx.storage.local import open_own

LAUNCHER_PID = "CLIPX_LAUNCHER_PID"  # set by clipx_local for the processes of its points

_TORCHRUN_ID = "TORCHELASTIC_RUN_ID"
_POLL_S = 1.0


class Watchdog:
    """Ends this process with exit code 70 after `timeout_s` seconds without a `beat`. 0 disables it.

    Before that, its thread writes the stacks of all threads to stderr, appends them to
    `run_dir/stacks.rank<rank>.txt`, and calls `event("watchdog", ...)`. Code that never releases Python's GIL stops it
    too: then faulthandler's timer, in C, writes the stacks to stderr and ends the process with exit code 1.
    """

    def __init__(self, timeout_s: float, run_dir: Path, rank: int, event: Callable[..., None]) -> None:
        self._timeout_s, self._rank, self._event = timeout_s, rank, event
        self._stacks = run_dir / f"stacks.rank{rank}.txt"
        self._step, self._last_beat = 0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._timeout_s:
            self.beat(0)
            self._start_timer()  # here too: the thread may be stopped before its first turn
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeout_s:
            self._stop.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def beat(self, step: int) -> None:
        """Reports progress: a step, a batch of an evaluation, or a part of a checkpoint. Takes well under 1 µs."""
        self._step, self._last_beat = step, time.monotonic()

    def _start_timer(self) -> None:
        faulthandler.dump_traceback_later(self._timeout_s + WRITE_S, exit=True, file=2)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            self._start_timer()
            if self._stalled_s() > self._timeout_s:
                abort(
                    f"rank {self._rank} made no progress for {self._stalled_s():.0f} s after step {self._step}, more "
                    f"than distributed.watchdog_s={self._timeout_s:g}: see the stack traces in {self._stacks}",
                    Exit.WATCHDOG,
                    self._report,
                )

    def _stalled_s(self) -> float:
        return time.monotonic() - self._last_beat

    def _report(self, reason: str, code: int) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(2)
        with open_own(self._stacks, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        seconds = round(self._stalled_s(), 1)
        self._event("watchdog", rank=self._rank, step=self._step, seconds=seconds, stacks=self._stacks.name)


def watch_launcher() -> None:
    """Starts a thread that ends this process with PeerLost's exit code when its launcher has ended.

    Not by PR_SET_PDEATHSIG, which also fires when the launcher's thread that started the process ends.
    """
    launcher = find_launcher()
    if launcher is not None:
        born = process_stat(launcher).born
        threading.Thread(target=_watch_launcher, args=(launcher, born), name="launcher", daemon=True).start()


def find_launcher() -> int | None:
    """Returns the pid of the torchrun agent or of the clipx_local that started this process, else None."""
    parent = os.getppid()
    if _TORCHRUN_ID not in os.environ:
        # Another value of the variable was inherited by a process that was started by hand.
        return parent if os.environ.get(LAUNCHER_PID) == str(parent) else None
    # The nearest ancestor outside of torchrun's environment: a wrapper script may be in between.
    pid, mark = parent, os.fsencode(f"{_TORCHRUN_ID}={os.environ[_TORCHRUN_ID]}")
    with contextlib.suppress(OSError):
        while mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = process_stat(pid).parent
    return pid if pid > 1 else parent


def _watch_launcher(launcher: int, born: str) -> None:
    while is_running(launcher, born):
        time.sleep(_POLL_S)
    reason = (
        f"the launcher of this process, pid {launcher}, has ended: the process ends without saving; check the "
        "launcher's output, and continue with resume=auto"
    )
    abort(reason, PeerLost.exit_code)
