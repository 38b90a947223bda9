"""Signals in this process. Stopping of whole runs: faults/test_stopping.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from clipx.distributed.comm import Comm
from clipx.run.signals import SIGNALS, StopSignals

COMM = Comm(0, 1, 0, torch.device("cpu"))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[object]]:
    """Restores the signal handlers, and asserts that the test has restored them."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield before
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def test_a_forked_process_ignores_the_signals(capfd: pytest.CaptureFixture[str]) -> None:
    """A SIGINT of the terminal, or a SLURM signal to the whole step, reaches loader processes as well."""
    with StopSignals() as stop:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0 if stop.received is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert capfd.readouterr().err == ""
