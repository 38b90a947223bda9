"""Signals before training begins. Imports nothing but the standard library's core: imports take seconds to minutes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from clipx.errors import Exit

# Sent by schedulers. SIGINT raises KeyboardInterrupt, as in any program.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_UNWIND_S = 5.0  # for the main thread to unwind; it may be blocked in a collective


class StoppedAtStart(SystemExit):
    """A signal stopped the process before training began. Not an Exception, which an import may catch."""

    def __init__(self, name: str) -> None:
        super().__init__(int(Exit.REQUEUE))
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} before training began: nothing to save, start it again"


class StartSignals:
    """Handlers by which SIGTERM, SIGUSR1 and SIGUSR2 end the process with exit code 75, before the training loop.

    The signal raises StoppedAtStart in the main thread, which releases locks and files. If that thread does not run
    Python code within 5 s, because it waits for other ranks, the process ends without it: Python delivers a signal to
    the main thread only, but at once writes its number to a pipe, which another thread reads.

    `clipx.run.signals.StopSignals` replaces the handlers during the training loop, and calls rank 0's with frame=None
    after the run has saved.
    """

    def __init__(
        self, end: Callable[[str], int] = lambda name: Exit.REQUEUE, saved: Callable[[], None] = lambda: None
    ) -> None:
        """Sets up the state.

        `end` is called with the name of the signal before the process ends, and returns its exit code. `saved` is
        called on rank 0 when the run has saved after a signal during training.
        """
        self._end, self._saved = end, saved
        self._pid = os.getpid()
        self._pipe: tuple[int, int] | None = None
        self._stopping = threading.Lock()
        self._raised = False  # whether a handler has raised StoppedAtStart

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work`, and restores the handlers after it. Handles no signals outside the main thread."""
        try:  # not a context: a signal may arrive while it is entered
            if threading.current_thread() is threading.main_thread():
                self._install()
            work()
        except StoppedAtStart as stop:
            sys.stdout.flush()
            self._stop(stop.name)
        finally:
            self._restore()

    def _install(self) -> None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_pipe)
        threading.Thread(target=self._end_blocked, args=self._pipe[:1], name="start signals", daemon=True).start()
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._handle)

    def _restore(self) -> None:
        for number in filter(self._handles, SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        if self._pipe is not None:
            _forget_pipe()
            os.close(self._pipe[1])  # ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process that inherited the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif frame is None:
            self._saved()
        else:
            self._raised = True
            raise StoppedAtStart(signal.Signals(number).name)

    def _end_blocked(self, reader: int) -> None:
        """Ends the process if the main thread has not handled a signal after some seconds."""
        while numbers := os.read(reader, 16):
            for number in filter(self._awaits, numbers):
                time.sleep(_UNWIND_S)
                if self._handles(number):
                    self._stop(signal.Signals(number).name)
                elif self._raised and signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                    # Raised in a callback, the exception was dropped, and training has begun: it stops after its step.
                    self._raised = False
                    os.kill(self._pid, number)
        os.close(reader)

    def _awaits(self, number: int) -> bool:
        """Returns whether a signal must end the process, which its handler does unless Python drops the exception."""
        return self._handles(number) or (number in SIGNALS and self._raised)

    def _handles(self, number: int) -> bool:
        return number in SIGNALS and signal.getsignal(number) == self._handle

    def _stop(self, name: str) -> NoReturn:
        if not self._stopping.acquire(blocking=False):
            time.sleep(_UNWIND_S)  # another thread ends the process, unless its files do not respond
            os._exit(Exit.REQUEUE)
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            with contextlib.suppress(OSError):
                os.write(2, f"stopped: {StoppedAtStart(name)}\n".encode())
        os._exit(self._end(name))  # a normal exit waits for the threads of a process group, which may block


def _forget_pipe() -> None:
    with contextlib.suppress(ValueError):  # outside the main thread
        signal.set_wakeup_fd(-1)
