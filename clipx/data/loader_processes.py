"""Loader processes: a DataLoader whose processes end with the trainer, and whose death is an error that names them."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from clipx.compat import loader_workers
from clipx.data.loader_process import start_process
from clipx.data.processes import Environment, blocked_sigterm, first_oom_kills, how_ended, start_in_child, why_ended
from clipx.errors import DataError, exhausted

T = TypeVar("T")

# That a loader process can still open, for the connections by which the trainer fetches shared memory while the process
# makes the next item, which has two open files for each tensor.
_SPARE_FILES = 32
_END_S = 5.0  # time in which the end of a process whose connection broke is seen


def start_loading(
    make: Callable[[Any], T | DataError], requests: Iterable[object], workers: int, ready: int, pin: bool = False
) -> Iterator[T | DataError]:
    """Starts processes that call `make` on each request. Returns an iterator of the results, taken by `receive`.

    Each process keeps `ready` results ready. Raises DataError if the processes cannot be started.
    """
    loader: DataLoader[T | DataError] = DataLoader(
        _Results(make),  # type: ignore[arg-type]  # its items are unpickled as the results
        batch_size=None,  # items are not collated
        sampler=requests,
        collate_fn=_identity,
        num_workers=workers,
        prefetch_factor=ready,
        worker_init_fn=exit_with_trainer,
        pin_memory=pin,
        generator=torch.Generator(),  # otherwise each iterator draws from the default generator, which dropout uses
    )
    first_oom_kills()
    try:
        with blocked_sigterm(), warnings.catch_warnings():  # SIGTERM is left to `exit_with_trainer`
            warnings.filterwarnings("ignore", "Got pickle error")  # several lines; the error follows
            return _deaths.watch(loader.__iter__)
    except (OSError, RuntimeError) as error:
        if lacking := exhausted(error):
            raise lacking from error
        if not isinstance(error, OSError):
            raise
        raise DataError(
            f"loader processes cannot be started ({error}): make /dev/shm a folder that this user may write to, or "
            "set data.workers=0"
        ) from error
    except (TypeError, AttributeError, pickle.PicklingError) as error:  # of local classes, locks and open files
        method = multiprocessing.get_start_method()
        if method == "fork":
            raise
        raise DataError(
            f"the data cannot be sent to loader processes ({error}), which multiprocessing starts by {method}: "
            "make them picklable, or set data.workers=0"
        ) from error


def receive(items: Iterator[T | DataError]) -> T | DataError:
    """Returns the next item. Raises StopIteration after the last, and DataError for a loader process that died."""
    if _in_main_thread():
        _deaths.awaited = items
    try:
        _check_alive(items)
        return next(items)
    except (RuntimeError, OSError, EOFError) as error:
        if lacking := exhausted(error):
            raise lacking from error
        # A connection to a process that is being killed breaks before its end can be seen.
        _check_alive(items, _END_S, error)
        if isinstance(error, RuntimeError):
            raise
        raise DataError(
            f"a loader process of this rank sent no batch ({error!r}): see its output above; if it lacks open "
            "files, raise ulimit -n, or lower data.workers or data.prefetch"
        ) from error
    finally:
        _deaths.awaited = None


def taken(item: T | DataError) -> T:
    """Returns the item. Raises it if it is an error."""
    if isinstance(item, DataError):
        raise item
    return item


class _Deaths:
    """Handler of SIGCHLD from the start of the first loader processes to the end of the last ones.

    It raises the death of a process of `awaited`, the iterator of which the main thread waits for an item, where a
    message that ends half-way would block it. The handler of torch, which it does not call, raises deaths in any
    statement, also in one that writes a file or releases a lock.
    """

    def __init__(self) -> None:
        self.awaited: object = None
        self._before: Any = None  # the handler that it has replaced, while it is installed
        self._running = 0  # iterators that have not ended

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.awaited is not None:
            _check_alive(self.awaited)
        if callable(self._before) and not self._before.__module__.startswith("torch."):
            self._before(signum, frame)

    def watch(self, start: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Returns the iterator that `start` returns."""
        before = handler = signal.getsignal(signal.SIGCHLD)
        try:
            items = start()
            if self._before is None and _in_main_thread():
                self._before, handler = before, self
        finally:
            if _in_main_thread():
                signal.signal(signal.SIGCHLD, handler)  # in place of that which torch installs
        self._running += 1
        weakref.finalize(items, self._ended)
        return items

    def _ended(self) -> None:
        self._running -= 1
        current: object = signal.getsignal(signal.SIGCHLD)
        if not self._running and _in_main_thread() and current is self:
            signal.signal(signal.SIGCHLD, self._before)
            self._before = None


_deaths = _Deaths()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _check_alive(items: object, wait_s: float = 0.0, cause: Exception | None = None) -> None:
    """Raises DataError if a loader process of the iterator has ended, or ends within `wait_s`."""
    workers = {worker.sentinel: worker for worker in loader_workers(items, ())}
    for ended in multiprocessing.connection.wait(workers, wait_s) if workers else ():
        worker = workers[ended]
        worker.join()
        if worker.exitcode or cause:  # with 0 all end after the last batch
            raise DataError(
                f"a loader process of this rank died (pid {worker.pid}, {how_ended(worker.exitcode)}): "
                + why_ended(worker.exitcode, "lower data.workers or data.prefetch")
            ) from cause


def exit_with_trainer(_worker: int) -> None:
    """Starts a loader process. It ends when its trainer ends or sends SIGTERM, and ignores SIGTERM from any other one.

    SLURM may send SIGTERM to every process of a job that it ends. A loader process that ended on it would bring the
    trainer down before it has saved.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in a process of a fork server that others started
    start_process(sends_batches=True)
    trainer = start_in_child()

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()


class _Results(Dataset[object]):
    """Data set of results that a loader process pickles in its main thread, with their tensors in shared memory.

    The thread of a queue would drop an item that it cannot pickle, for lack of shared memory or of open files, and the
    trainer would wait for it for ever.
    """

    def __init__(self, make: Callable[[Any], object]) -> None:
        self._make = make
        self._lacking: DataError | None = None  # the first error: an item that is not sent keeps files

    def __reduce__(self) -> tuple[Callable[..., _Results], tuple[Environment, Callable[[Any], object]]]:
        return _results, (Environment(), self._make)  # unpickled in this order: imports of a plug-in need the first

    def __getitem__(self, request: object) -> _Pickled:
        if self._lacking is not None:
            return _Pickled(self._lacking)
        try:
            found = _Pickled(self._make(request))
            with contextlib.ExitStack() as spare:
                for _ in range(_SPARE_FILES):
                    spare.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            return found
        except (OSError, RuntimeError, MemoryError) as error:
            lacking = exhausted(error)
            if lacking is None:
                raise
            self._lacking = DataError(f"in a loader process: {lacking}")
            return _Pickled(self._lacking)


def _results(_environment: Environment, make: Callable[[Any], object]) -> _Results:
    return _Results(make)


class _Pickled:
    """Item that is unpickled as what it was made of."""

    def __init__(self, item: object) -> None:
        self._content = bytes(ForkingPickler.dumps(item))

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return ForkingPickler.loads, (self._content,)


def _identity(item: T) -> T:
    return item
