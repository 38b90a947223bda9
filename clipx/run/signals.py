"""Stopping on purpose: a signal sets a flag, the ranks agree at the end of a step, save, and exit with its own code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from types import FrameType

from clipx.distributed.comm import Comm
from clipx.errors import Exit

log = logging.getLogger(__name__)

# Where several arrive, the last of this order holds: a handler that requeues the job sits on SIGUSR1 or SIGUSR2.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_ONE_S = 1.0  # a launcher and its manager may both deliver a signal: within this time it is the same one


class Stop:
    """While this is entered, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 ask for the end of the run after its next step.

        with Stop(tell=comm.is_main) as stop:
            for ...:
                step()
                if name := stop.agreed(comm):
                    save()
                    stop.after_save(comm)
                    raise Stopped(...)

    Whoever sends one may kill the process later: torchrun after 30 s (--shutdown-timeout), SLURM after its KillWait. A
    job that needs longer to save asks for an early signal, as by --signal=USR1@120.

    What comes after the first is ignored, but for SIGINT, which ends the process at once with exit code 130. A signal
    that was ignored before stays ignored. Outside the main thread Python can handle none: there all stays as it is.
    """

    def __init__(self, tell: bool = True) -> None:
        """`tell`: whether this process says on stderr what it got."""
        self._tell, self._told = tell, False
        self._place = 0  # in SIGNALS, from 1: what this process got
        self._agreed = 0  # what the ranks agreed on
        self._since = 0.0
        self._previous: dict[signal.Signals, object] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Stop:
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals do not stop this run at a step: it is not in the program's main thread")
            return self
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, None):  # None: not Python's, and could not be put back
                self._previous[number] = previous
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]  # what getsignal gave
        self._previous.clear()

    @property
    def requested(self) -> str | None:
        """The signal that this process got."""
        return SIGNALS[self._place - 1].name if self._place else None

    @property
    def waited_s(self) -> float:
        """Seconds since it got its first one; 0 where it got none."""
        return time.monotonic() - self._since if self._place else 0.0

    def agreed(self, comm: Comm) -> str | None:
        """The signal that any rank got, the same on all of them. One small collective: call it once a step."""
        (self._agreed,) = comm.max(self._place)
        return SIGNALS[self._agreed - 1].name if self._agreed else None

    def after_save(self, comm: Comm) -> None:
        """Calls what rank 0 had for the agreed signal before, as submitit's requeuing. That may end the process."""
        if comm.is_main and self._agreed:
            number = SIGNALS[self._agreed - 1]
            previous = self._previous.get(number)
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the main thread: no collective, no file, no lock."""
        if os.getpid() != self._pid:
            return  # a loader process that inherited this: its trainer tells it when to end
        got = signal.Signals(number)
        first = not self._place
        if first:
            self._since = time.monotonic()
            self._say(f"{got.name}: stopping after this step; SIGINT, once more, aborts")
        elif got == signal.SIGINT and self.waited_s > _ONE_S:
            self._say("SIGINT: aborted; the last whole checkpoint is as it was")
            os._exit(Exit.ABORTED)  # the usual way waits for threads, and may be what hangs
        elif not self._told and self.waited_s > _ONE_S:
            self._told = True
            self._say(f"{got.name}: already stopping")
        self._place = max(self._place, SIGNALS.index(got) + 1)

    def _say(self, line: str) -> None:
        if self._tell:
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())  # print may be what was interrupted
