"""Graceful stop: a signal sets a flag, which the ranks exchange after each step. They save and exit with code 75.

The exchange is read after the next step, so that no rank waits for it: several ranks stop one step later than one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from types import FrameType

from clipx.distributed.comm import Agreement, Comm
from clipx.errors import Exit

log = logging.getLogger(__name__)

# Of several signals the last in this order is used: a handler that requeues the job is on SIGUSR1 or SIGUSR2.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_DUPLICATE_S = 1.0  # repeats within this time are the same signal: a launcher and its manager may both deliver it


class StopSignals:
    """Context in which SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 request the end of the run after its current or next step.

        with StopSignals(verbose=comm.is_main) as stop:
            for ...:
                step()
                if name := stop.received_by_any(comm):
                    save()
                    stop.call_previous_handler(comm)
                    raise Stopped(...)

    The sender may kill the process later: torchrun after 30 s (--shutdown-timeout), SLURM after its KillWait. A job
    that needs longer to save requests an earlier signal, for example with --signal=USR1@120.

    Signals after the first are ignored, except SIGINT, which ends the process at once with exit code 130. A signal that
    was ignored before stays ignored. Outside the main thread Python cannot handle signals, and nothing changes.
    """

    def __init__(self, verbose: bool = True) -> None:
        """Sets up the state. `verbose`: write received signals to stderr."""
        self._verbose, self._repeat_logged = verbose, False
        self._received = 0  # signal of this process: its position in SIGNALS, from 1; 0: none
        self._agreement = Agreement()
        self._first_at = 0.0
        self._previous: dict[signal.Signals, object] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals do not stop this run after a step: it does not run in the main thread of the program")
            return self
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, None):  # None: not a Python handler, cannot be restored
                self._previous[number] = previous
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]  # from getsignal
        self._previous.clear()

    @property
    def received(self) -> str | None:
        """Name of the signal that this process received, or None."""
        return SIGNALS[self._received - 1].name if self._received else None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first signal of this process, or 0 if it received none."""
        return time.monotonic() - self._first_at if self._received else 0.0

    def received_by_any(self, comm: Comm) -> str | None:
        """Returns the signal that any rank had received at the previous call, the same on all ranks, or None.

        One small collective of the hosts: call it once per step. With one rank the signals of this call count.
        """
        received = self._agreement.exchange(comm, self._received)
        return SIGNALS[received - 1].name if received else None

    def call_previous_handler(self, comm: Comm) -> None:
        """Calls rank 0's previous handler of the signal, such as submitit's, which requeues the job.

        Signals that a rank received since the run began to stop count: SLURM preempts with SIGTERM and the signal of
        --signal at once, and either may be handled first. Collective. May end the process.
        """
        received = max(comm.gather_objects(self._received))
        if comm.is_main and received:
            number = SIGNALS[received - 1]
            previous = self._previous.get(number)
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Records the signal. Runs between any two instructions of the main thread: no collectives, files or locks."""
        if os.getpid() != self._pid:
            return  # a loader process that inherited the handler: the trainer stops it
        name = signal.Signals(number).name
        if not self._received:
            self._first_at = time.monotonic()
            self._write(f"{name}: stopping after this step; another SIGINT aborts")
        elif number == signal.SIGINT and self.elapsed_s > _DUPLICATE_S:
            self._write("SIGINT: aborted; the last complete checkpoint is intact")
            os._exit(Exit.ABORTED)  # a normal exit waits for threads and may hang
        elif not self._repeat_logged and self.elapsed_s > _DUPLICATE_S:
            self._repeat_logged = True
            self._write(f"{name}: already stopping")
        self._received = max(self._received, SIGNALS.index(signal.Signals(number)) + 1)

    def _write(self, line: str) -> None:
        if self._verbose:
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())  # not print, which the signal may have interrupted
