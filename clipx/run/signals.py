"""Graceful stop: a signal sets a flag, the ranks compare it after each step, save, and exit with a code of its own."""

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

_DUPLICATE_S = 1.0  # a launcher and its manager may both deliver a signal: within this time it is the same one


class StopSignals:
    """While this is entered, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 ask for the end of the run after its next step.

        with StopSignals(verbose=comm.is_main) as stop:
            for ...:
                step()
                if name := stop.received_by_any(comm):
                    save()
                    stop.call_previous_handler(comm)
                    raise Stopped(...)

    Whoever sends one may kill the process later: torchrun after 30 s (--shutdown-timeout), SLURM after its KillWait. A
    job that needs longer to save asks for an early signal, as by --signal=USR1@120.

    What comes after the first is ignored, but for SIGINT, which ends the process at once with exit code 130. A signal
    that was ignored before stays ignored. Outside the main thread Python can handle none: there all stays as it is.
    """

    def __init__(self, verbose: bool = True) -> None:
        """`verbose`: whether this process writes what it received to stderr."""
        self._verbose, self._repeat_logged = verbose, False
        self._received = 0  # what this process received, as its place in SIGNALS from 1
        self._received_by_any = 0  # the highest of all ranks
        self._first_at = 0.0
        self._previous: dict[signal.Signals, object] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignals:
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
    def received(self) -> str | None:
        """The signal that this process received."""
        return SIGNALS[self._received - 1].name if self._received else None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first signal of this process; 0 where it received none."""
        return time.monotonic() - self._first_at if self._received else 0.0

    def received_by_any(self, comm: Comm) -> str | None:
        """The signal that any rank received, the same on all ranks. One small collective: call it once a step."""
        (self._received_by_any,) = comm.max(self._received)
        return SIGNALS[self._received_by_any - 1].name if self._received_by_any else None

    def call_previous_handler(self, comm: Comm) -> None:
        """Calls rank 0's earlier handler of the signal, as submitit's, which requeues the job. May end the process."""
        if comm.is_main and self._received_by_any:
            number = SIGNALS[self._received_by_any - 1]
            previous = self._previous.get(number)
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the main thread: no collective, no file, no lock."""
        if os.getpid() != self._pid:
            return  # a loader process that inherited this: its trainer tells it when to end
        name = signal.Signals(number).name
        if not self._received:
            self._first_at = time.monotonic()
            self._write(f"{name}: stopping after this step; SIGINT, once more, aborts")
        elif number == signal.SIGINT and self.elapsed_s > _DUPLICATE_S:
            self._write("SIGINT: aborted; the last whole checkpoint is as it was")
            os._exit(Exit.ABORTED)  # the usual way waits for threads, and may be what hangs
        elif not self._repeat_logged and self.elapsed_s > _DUPLICATE_S:
            self._repeat_logged = True
            self._write(f"{name}: already stopping")
        self._received = max(self._received, SIGNALS.index(signal.Signals(number)) + 1)

    def _write(self, line: str) -> None:
        if self._verbose:
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())  # print may be what was interrupted
