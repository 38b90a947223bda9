"""Loader processes: a DataLoader whose processes end with the trainer, and whose death is an error that names them."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from clipx.errors import DataError

T = TypeVar("T")

_POLL_S = 5.0  # interval of a loader process's checks that its trainer is alive, as in torch
_END_S = 5.0  # time in which the end of a process whose connection broke is seen


class ProcessLoader(DataLoader[T]):
    """DataLoader that raises the DataErrors returned by its dataset, and one if a loader process died.

    An item of the dataset is a batch or a part of one; each process keeps `prefetch` items ready.
    """

    def __init__(
        self, dataset: Dataset[T | DataError], items: Iterable[object], workers: int, prefetch: int, pin: bool = False
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]  # __iter__ raises the errors
            batch_size=None,  # items are not collated
            sampler=items,
            collate_fn=_identity,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            worker_init_fn=partial(exit_with_trainer, os.getpid()),
            pin_memory=pin,
            # Otherwise each iterator draws from the default generator, which dropout uses.
            generator=torch.Generator(),
        )

    def start(self) -> Iterator[T | DataError]:
        """Starts the processes. Returns an iterator whose items are taken by `receive`."""
        # Without the handler of SIGCHLD that torch installs, and with SIGTERM left to `exit_with_trainer`.
        with _replaced_sigchld(None), _blocked_sigterm():
            return super().__iter__()

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        items = self.start()
        with contextlib.suppress(StopIteration):
            # Without a local variable: the shared memory of an item is free as soon as the caller drops it.
            while True:
                yield taken(receive(items))


def receive(items: Iterator[T | DataError]) -> T | DataError:
    """Returns the next item. Raises StopIteration after the last, and DataError for a loader process that died."""
    with _replaced_sigchld(lambda *_: _check_alive(items)):
        try:
            _check_alive(items)
            return next(items)
        except (RuntimeError, OSError, EOFError) as error:
            # A connection to a process that is being killed breaks before its end can be seen.
            _check_alive(items, _END_S, error)
            raise


def taken(item: T | DataError) -> T:
    """Returns the item. Raises it if it is an error."""
    if isinstance(item, DataError):
        raise item
    return item


@contextlib.contextmanager
def _replaced_sigchld(handler: Callable[[int, FrameType | None], None] | None) -> Iterator[None]:
    """Replaces the handler of SIGCHLD by `handler`, if given, and restores it. No effect outside the main thread.

    Torch's handler raises the death of a loader process in any statement, also in one that writes a file or releases a
    lock. Here it is raised only while the trainer waits for a batch, where a message that ends half-way would block it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@contextlib.contextmanager
def _blocked_sigterm() -> Iterator[None]:
    """Blocks SIGTERM for this thread, and for all threads of the processes that it forks.

    A process that blocks it in its first statement would be late: libraries start threads in every process that is
    forked, as wandb's do for its telemetry, and SIGTERM ends a process as soon as one thread does not block it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_alive(items: object, wait_s: float = 0.0, cause: Exception | None = None) -> None:
    """Raises DataError if a loader process of the iterator has ended, or ends within `wait_s`."""
    workers = {worker.sentinel: worker for worker in getattr(items, "_workers", ())}
    for ended in multiprocessing.connection.wait(workers, wait_s) if workers else ():
        worker = workers[ended]
        worker.join()
        if worker.exitcode or cause:  # with 0 all end after the last batch
            how = f"by {signal.Signals(-worker.exitcode).name}" if worker.exitcode < 0 else f"code {worker.exitcode}"
            raise DataError(
                f"a loader process of this rank died (pid {worker.pid}, {how}), usually killed for lack of memory: "
                "lower data.workers or data.prefetch, or give the job more memory"
            ) from cause


def exit_with_trainer(trainer: int, _worker: int) -> None:
    """Ends a loader process when the process `trainer` ends, and ignores SIGTERM from any other process.

    The process was forked with SIGTERM blocked (`_blocked_sigterm`).
    SLURM may send SIGTERM to every process of a job that it ends. A loader process that ended on it would bring the
    trainer down before it has saved. torch's check of the parent process is not sufficient: if the trainer dies while
    the loader process starts, torch takes the adopting process for the trainer, and the loader process never ends.
    """

    def wait() -> None:
        sender = None
        while sender != trainer and os.getppid() == trainer:
            received = signal.sigtimedwait({signal.SIGTERM}, _POLL_S)
            sender = received and received.si_pid
        os._exit(0)

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()


def _identity(item: T) -> T:
    return item
