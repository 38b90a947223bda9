"""Pace of background work, so that it takes little time from the training."""

from __future__ import annotations

import threading
import time


class Pace:
    """Limits a thread to a `share` of one core, by sleeping in proportion to its CPU time, for at most `seconds`.

    A step on all cores waits for the slowest: without a limit, hashing and writing on one of two cores makes it take
    up to twice as long. `hurry` ends the limit at once.
    """

    def __init__(self, share: float, seconds: float) -> None:
        self._share = share
        self._end = time.monotonic() + seconds
        self._hurried = threading.Event()

    def hurry(self) -> None:
        """Ends the limit. Any thread may call it."""
        self._hurried.set()

    def pause(self, worked: float) -> None:
        """Sleeps after `worked` seconds of CPU time."""
        self._hurried.wait(max(0.0, min(worked * (1 / self._share - 1), self._end - time.monotonic())))
