"""Signals in this process; whole runs that are stopped are in integration/test_stopping.py."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from clipx.distributed.comm import Comm
from clipx.run.signals import SIGNALS, StopSignals

COMM = Comm(0, 1, 0, torch.device("cpu"))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[object]]:
    """What was there before is there again."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield before
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_kept_until_it_is_asked_for(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        assert (stop.received, stop.received_by_any(COMM), stop.elapsed_s) == (None, None, 0)
        os.kill(os.getpid(), number)
        assert stop.received == stop.received_by_any(COMM) == number.name
        assert stop.elapsed_s > 0
    assert capfd.readouterr().err == f"{number.name}: stopping after this step; another SIGINT aborts\n"


def test_a_process_that_shall_not_tell_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals(verbose=False) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == "SIGTERM"
    assert capfd.readouterr().err == ""


def test_handlers_return_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), StopSignals():
        raise ZeroDivisionError


def test_what_was_there_before_runs_after_the_save_and_pythons_own_does_not() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    try:
        with StopSignals(verbose=False) as stop:
            stop.call_previous_handler(COMM)
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received_by_any(COMM) == "SIGUSR2", "where the job is put back in the queue"
            assert calls == []
            stop.call_previous_handler(COMM)
            assert calls == [signal.SIGUSR2]
        with StopSignals(verbose=False) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.received_by_any(COMM) == "SIGINT"
            stop.call_previous_handler(COMM)  # raises no KeyboardInterrupt
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_it_says_that_it_does_nothing(
    handlers: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        with StopSignals() as stop:
            assert [signal.getsignal(number) for number in SIGNALS] == handlers
            found.append(stop.received_by_any(COMM))

    found: list[str | None] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]
    assert caplog.messages == [
        "signals do not stop this run after a step: it does not run in the main thread of the program"
    ]


def test_a_forked_process_does_not_take_part(capfd: pytest.CaptureFixture[str]) -> None:
    """A SIGINT at the terminal, or one of SLURM's to the whole step, reaches loader processes as well."""
    with StopSignals() as stop:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0 if stop.received is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert capfd.readouterr().err == ""
