"""Waiting for a condition, without a limit that a busy machine could reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 600.0
"""Limit of a wait: it ends a test that hangs, and decides nothing else."""


def wait_until(true: Callable[[], T], failure: str | Callable[[], str] = "the condition is false") -> T:
    """Calls `true` until its result is true, and returns that. Fails after SECONDS with `failure`."""
    end = time.monotonic() + SECONDS
    while not (found := true()):
        if time.monotonic() >= end:
            raise AssertionError(f"after {SECONDS:g} s: {failure if isinstance(failure, str) else failure()}")
        time.sleep(0.02)
    return found
