"""State of a process that reads samples: each process has its own, and its threads answer calls in order."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection

import pytest
from helpers.samples import Called

from clipx.data.loader_pool import load
from clipx.data.loader_process import Threads, start_process, this_process


def is_loader(_item: object) -> tuple[int, bool]:
    return os.getpid(), this_process().sends_batches


def test_loader_processes_send_batches_and_the_trainer_does_not() -> None:
    ((pid, sends),) = load(None, Called(is_loader), [1], workers=1, ready=1)
    assert pid != os.getpid() and sends
    assert is_loader(1) == (os.getpid(), False)


def _send_state(connection: Connection) -> None:
    state = this_process()
    connection.send((state.shared_files, state.whole_shards.submit(os.getpid).result(600)))


def test_a_forked_process_has_neither_the_threads_nor_the_files_of_its_parent() -> None:
    start_process()
    this_process().shared_files.append(77)
    this_process().whole_shards.submit(os.getpid).result()  # starts a thread, which does not survive a fork
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send_state, args=(there,))
    process.start()
    assert here.recv() == ([], process.pid)
    process.join()
    start_process()


def test_threads_make_calls_in_order_and_no_cancelled_ones() -> None:
    threads, begun, goes_on = Threads(1), threading.Event(), threading.Event()
    made: list[int] = []
    first = threads.submit(lambda: begun.set() or goes_on.wait(600))
    others: list[Future[None]] = [threads.submit(lambda k=k: made.append(k)) for k in range(3)]  # type: ignore[misc]
    begun.wait(600)
    others[1].cancel()
    goes_on.set()
    assert first.result() is True
    others[2].result()
    assert made == [0, 2]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result()
