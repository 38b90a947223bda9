"""Signals that stop a run: before training begins at once, during training after a step.

Imports nothing but the standard library's core, because other imports take seconds to minutes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from clipx.abort import ENDING, write_line
from clipx.errors import Exit
from clipx.output import flush_output

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm

log = logging.getLogger(__name__)

SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Of several signals the last in this order is used: a handler that requeues the job is on SIGUSR1 or SIGUSR2.
SIGNALS = (signal.SIGINT, *SCHEDULER_SIGNALS)

_remaining: list[StopSignals] = []  # whose handlers remain after the run, in a command
_UNWIND_S = 5.0  # for the main thread to unwind; it may be blocked in a collective
_DUPLICATE_S = 1.0  # repeats within this time are the same signal: a launcher and its manager may both deliver it


class StoppedAtStart(SystemExit):
    """A signal stopped the process before training began. Not an Exception, which an import may catch."""


class StartSignals:
    """Handlers by which SIGTERM, SIGUSR1 and SIGUSR2 end the process with exit code 75, before the training loop.

    The signal raises StoppedAtStart in the main thread, which releases locks and files. Then a thread ends the process,
    after 5 s also if the main thread waits for other ranks: it reads the pipe to which Python at once writes a signal's
    number. `StopSignals` replaces the handlers during the training loop, and calls rank 0's with frame=None after the
    run has saved.
    """

    def __init__(
        self, end: Callable[[str], int] = lambda reason: Exit.REQUEUE, saved: Callable[[], None] = lambda: None
    ) -> None:
        """Takes `end`, called with the reason before the process ends, which returns its exit code, and `saved`, called
        on rank 0 when the run has saved after a signal during training."""
        self._end, self._saved = end, saved
        self.when = "before training began"  # of the signal, in its message
        self.raised: int | None = None  # the signal for which a handler has raised StoppedAtStart
        self._unwound = threading.Event()

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work` in the main thread, and restores the handlers after it."""
        try:  # not a context: a signal may arrive while it is entered
            self._install()
            work()
        except StoppedAtStart:
            flush_output()
            self._unwound.set()
            time.sleep(_UNWIND_S)  # the thread ends the process, unless its files do not respond
            os._exit(Exit.REQUEUE)
        finally:
            self._restore()

    def _install(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._restore)  # a forked process has its own signals
        threading.Thread(target=self._end_process, args=(reader,), name="start signals", daemon=True).start()
        for number in SCHEDULER_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._handle)

    def _restore(self) -> None:
        for number in filter(self._handles, SCHEDULER_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def _handles(self, number: int) -> bool:
        return number in SCHEDULER_SIGNALS and signal.getsignal(number) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if frame is None:
            self._saved()
        elif self.raised is None and not ENDING.is_set():  # else the main thread unwinds, or reports a lost rank
            self.raised = number
            raise StoppedAtStart(Exit.REQUEUE)

    def _end_process(self, reader: int) -> None:
        """Ends the process by a signal that still has this handler after the time to unwind."""
        while True:
            number = os.read(reader, 1)[0]
            if ENDING.is_set():  # torchrun sends SIGTERM when it has lost a rank, which this one is to name
                continue
            if self._handles(number) and (self._unwound.wait(_UNWIND_S) or self._handles(number)):
                name = signal.Signals(number).name
                reason = f"{name} {self.when}: nothing to save, start it again"
                if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
                    write_line(f"stopped: {reason}")
                os._exit(self._end(reason))  # a normal exit waits for the threads of a process group, which may block


class StopSignals:
    """Context in which SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 request the end of the run after its current or next step.

        with StopSignals(verbose=comm.is_main) as stop:
            for ...:
                step()
                if name := stop.received_by_any(comm):
                    save()
                    stop.call_previous_handler(comm)
                    raise Stopped(...)

    Several ranks stop one step later than one, since they agree on the signal without a wait. Signals after the first,
    or after `finish`, are ignored, except a second SIGINT, which ends the process at once with exit code 130. A signal
    that was ignored before stays ignored. In a command with StartSignals the handlers remain until it ends, or
    `begin_run`.
    """

    def __init__(self, verbose: bool = True) -> None:
        """Takes `verbose`: write received signals to stderr."""
        from clipx.distributed.comm import Agreement  # loads other packages

        self._write = write_line if verbose else lambda line: None
        self._repeat_logged = False
        self._received = 0  # signal of this process: its position in SIGNALS, from 1; 0: none
        self._agreement = Agreement()
        self._first_at = 0.0
        self._previous: dict[signal.Signals, object] = {}
        self._pid = os.getpid()
        self._then = "stopping after this step"

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals do not stop this run after a step: it does not run in the main thread of the program")
            return self
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, None):  # None: not a Python handler, cannot be restored
                self._previous[number] = previous
                signal.signal(number, self._handle)
                start = getattr(previous, "__self__", None)
                if isinstance(start, StartSignals) and start.raised == number:
                    self._handle(number, None)  # Python drops an exception that is raised in a callback
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        if any(isinstance(getattr(previous, "__self__", None), StartSignals) for previous in self._previous.values()):
            _remaining.append(self)
        else:
            self.restore()

    def finish(self) -> None:
        """Call it after the last step: signals do not end the run from then on."""
        self._then = "the run is ending already"

    def restore(self) -> None:
        """Restores the previous handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]  # from getsignal
        self._previous.clear()

    @property
    def received(self) -> str | None:
        """Name of the signal that this process received, or None."""
        return SIGNALS[self._received - 1].name if self._received else None

    def received_by_any(self, comm: Comm) -> str | None:
        """Returns the signal that any rank had received at the previous call, the same on all ranks, or None.

        One small collective of the hosts: call it once per step. With one rank the signals of this call count.
        """
        received = self._agreement.exchange(comm, self._received)
        return SIGNALS[received - 1].name if received else None

    def call_previous_handler(self, comm: Comm) -> None:
        """Calls rank 0's previous handler of the signal, such as submitit's, which requeues the job. Collective.

        Later signals count, too: SLURM preempts with SIGTERM and the signal of --signal at once. May end the process.
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
        received = signal.Signals(number)
        if not self._received:
            self._first_at = time.monotonic()
            self._write(f"{received.name}: {self._then}; another SIGINT aborts")
        elif time.monotonic() - self._first_at > _DUPLICATE_S:
            if received == signal.SIGINT:
                self._write("SIGINT: aborted; the last complete checkpoint is intact")
                os._exit(Exit.ABORTED)  # a normal exit waits for threads and may hang
            if not self._repeat_logged:
                self._repeat_logged = True
                self._write(f"{received.name}: already stopping")
        self._received = max(self._received, SIGNALS.index(received) + 1)


def begin_run() -> None:
    """Restores the handlers of StartSignals for a further run of this process, and passes on a signal since then."""
    while _remaining:
        before = _remaining.pop()
        before.restore()
        if name := before.received:
            os.kill(os.getpid(), signal.Signals[name])
