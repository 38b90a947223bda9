"""Signals in this process. Stopping of whole runs: faults/test_stopping.py."""

from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_stored_until_it_is_read(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    """The fixture asserts that handlers are restored, also after an error."""
    with contextlib.suppress(ZeroDivisionError), StopSignals() as stop:
        assert (stop.received, stop.received_by_any(COMM)) == (None, None)
        os.kill(os.getpid(), number)
        assert stop.received == stop.received_by_any(COMM) == number.name
        raise ZeroDivisionError
    assert capfd.readouterr().err == f"{number.name}: stopping after this step; another SIGINT aborts\n"


def test_a_previous_handler_runs_after_the_save_unless_it_is_pythons_default(
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    try:
        with StopSignals(verbose=False) as stop:
            stop.call_previous_handler(COMM)
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received_by_any(COMM) == "SIGUSR2", "the signal whose handler requeues the job has priority"
            assert calls == []
            stop.call_previous_handler(COMM)
            assert calls == [signal.SIGUSR2]
        with StopSignals(verbose=False) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received_by_any(COMM) == "SIGTERM"
            os.kill(os.getpid(), signal.SIGUSR2)
            stop.call_previous_handler(COMM)
            assert calls == [signal.SIGUSR2] * 2, "a signal that arrives during the save counts"
        capfd.readouterr()
        with StopSignals(verbose=False) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.received_by_any(COMM) == "SIGINT"
            assert capfd.readouterr().err == "", "verbose=False"
            stop.call_previous_handler(COMM)  # must not raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGUSR2, before)


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
