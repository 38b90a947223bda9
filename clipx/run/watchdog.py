"""Kills a stalled run and dumps its stack traces. A hanging job costs as much as a training job."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

from clipx.errors import Exit
from clipx.run.abort import WRITE_S, abort


class Watchdog:
    """Ends this process with exit code 70 after `timeout_s` seconds without a `beat`. 0 disables it.

    Before that, it writes the stacks of all threads to stderr, appends them to `run_dir/stacks.rank<rank>.txt`, and
    calls `event("watchdog", ...)`. It runs in a separate thread, because the main thread may wait for a collective or a
    file. Code that never releases Python's GIL stops this thread too: then faulthandler's timer, which runs in C,
    writes the stacks to stderr and ends the process a little later with exit code 1.
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

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            self._start_timer()
            stalled_s = time.monotonic() - self._last_beat
            if stalled_s > self._timeout_s:
                self._kill(stalled_s)

    def _start_timer(self) -> None:
        faulthandler.dump_traceback_later(self._timeout_s + WRITE_S, exit=True, file=2)

    def _kill(self, stalled_s: float) -> None:
        line = (
            f"rank {self._rank} made no progress for {stalled_s:.0f} s after step {self._step}, more than "
            f"distributed.watchdog_s={self._timeout_s:g}: see the stack traces in {self._stacks}"
        )
        abort(line, Exit.WATCHDOG, lambda: self._write(line, stalled_s))

    def _write(self, line: str, stalled_s: float) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(2)
        with self._stacks.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        self._event("watchdog", rank=self._rank, step=self._step, seconds=round(stalled_s, 1), stacks=self._stacks.name)
