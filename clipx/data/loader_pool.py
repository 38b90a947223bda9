"""One set of loader processes, those of a DataLoader, for training and all evaluations of a rank.

The processes work on the items of the newest stream first, so an evaluation has all of them. Training items that were
requested before are received meanwhile and remain ready.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing.connection
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from clipx.compat import loader_workers
from clipx.data.loader_process import start_process, this_process
from clipx.errors import DataError, exhausted
from clipx.processes import Environment, blocked_sigterm, first_oom_kills, how_ended, start_in_child, why_ended

T = TypeVar("T")

# That a loader process can still open, for the connections by which the trainer fetches shared memory while the process
# makes the next item, which has two open files for each tensor.
_SPARE_FILES = 32
_END_S = 5.0  # time in which the end of a process whose connection broke is seen

_MOST_BYTES = 2**20  # largest description of a data set that is sent with each of its items

_LOADED = 8  # number of data sets that a loader process keeps


class LoaderPool:
    """Loader processes of a rank, which make the items of any data set, and keep `ready` each. Call `close` to end
    them. `known`: objects that data sets refer to, with which the processes start; all other parts of a data set are
    pickled."""

    def __init__(self, workers: int, ready: int, pin: bool, known: Sequence[object]) -> None:
        self.workers = workers
        self._known = {id(one): number for number, one in enumerate(known)}
        self._streams: list[_BatchStream[Any]] = []  # open ones, the newest last
        self._requested = deque[_BatchStream[Any] | None]()  # the stream of each item in flight; None: no work
        make, requests = partial(_made, tuple(known)), self._requests()
        self._items: Iterator[object] | None = start_loading(make, requests, workers, ready, pin)

    def close(self) -> None:
        """Ends the processes."""
        self._items = None

    def describe(self, dataset: Dataset[Any]) -> bytes | None:
        """Returns a description of a data set for the processes; None if it is too large, or cannot be pickled."""
        file = io.BytesIO()
        try:
            _Pickler(file, self._known).dump(dataset)
        except (pickle.PicklingError, TypeError, AttributeError):  # raised for local classes, locks and open files
            return None
        return file.getvalue() if file.tell() <= _MOST_BYTES else None

    def stream(self, dataset: bytes, items: Iterable[object], ready: int) -> Iterator[T]:
        """Yields the described data set's items, in this order. Raises the DataErrors that the data set raises. Each
        process keeps at most `ready` of them ready."""
        stream = _BatchStream[T](dataset, iter(items), ready * self.workers)
        self._streams.append(stream)
        try:
            # Without a local variable: the shared memory of an item is free as soon as the caller drops it.
            while self._fill(stream):
                yield taken(stream.ready.popleft())
        finally:
            stream.close()
            self._streams.remove(stream)

    def _fill(self, stream: _BatchStream[Any]) -> bool:
        """Receives items until one of the stream is ready. Returns whether there is one."""
        self._skip_idle()
        while not stream.ready and (stream.in_flight or stream.has_more()):
            self._receive()
        return bool(stream.ready)

    def _receive(self) -> None:
        """Receives the oldest item in flight, in place of which another is requested."""
        assert self._items is not None, "the loader processes have ended"
        stream = self._requested.popleft()
        if stream is not None:
            stream.in_flight -= 1
        # A training batch that an evaluation receives must not consist of inference tensors.
        with torch.inference_mode(False):
            item = receive(self._items)
        if stream is not None and not stream.closed:
            stream.ready.append(item)

    def _skip_idle(self) -> None:
        """Requests items in place of those without work, as far as a stream may have more of them."""
        while self._requested and self._requested[0] is None and any(one.wants() for one in self._streams):
            self._receive()

    def _requests(self) -> Iterator[_Request | None]:
        """Yields what the processes work on; None if no stream may have more items. It is endless, as a DataLoader ends
        its processes at the end of its sampler."""
        while True:
            stream = next((one for one in reversed(self._streams) if one.wants()), None)
            self._requested.append(stream)
            yield None if stream is None else stream.request()


# ------------------------------------------------------------------------------------------------------------ streams


@dataclass(eq=False, slots=True)
class _BatchStream(Generic[T]):
    """Items of one loader: those that are ready in the trainer, and how many are in flight."""

    dataset: bytes
    items: Iterator[object]
    most: int  # largest number of items in flight or ready
    ready: deque[T | DataError] = field(default_factory=deque)
    in_flight: int = 0
    closed: bool = False
    _ahead: list[object] = field(default_factory=list)  # the next item, if it was looked at

    def has_more(self) -> bool:
        """Returns whether there are items that were not requested."""
        if not self._ahead and not self.closed:
            self._ahead += itertools.islice(self.items, 1)
        return bool(self._ahead)

    def wants(self) -> bool:
        """Returns whether another item may be requested."""
        return self.in_flight + len(self.ready) < self.most and self.has_more()

    def request(self) -> _Request:
        """Returns the request of the next item."""
        self.in_flight += 1
        return self.dataset, self._ahead.pop()

    def close(self) -> None:
        self.closed = True
        self.ready.clear()
        self._ahead.clear()


_Request = tuple[bytes, object]  # description of a data set, and the item of it that is wanted


def _made(known: Sequence[object], request: _Request | None) -> object:
    """Returns the item of a request, made by this loader process."""
    if request is None:
        return None
    (described, item), datasets = request, this_process().datasets
    dataset = datasets.pop(described, None)
    if dataset is None:
        dataset = _Unpickler(io.BytesIO(described), known).load()
    if len(datasets) >= _LOADED:
        datasets.pop(next(iter(datasets)))
    datasets[described] = dataset  # the one used last is the last
    return dataset[item]


class _Pickler(pickle.Pickler):
    """Pickles known objects as their number."""

    def __init__(self, file: io.BytesIO, known: dict[int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._known = known

    def persistent_id(self, obj: object) -> int | None:
        return self._known.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, number: int) -> object:
        return self._known[number]


def load(
    pool: LoaderPool | None,
    dataset: Dataset[T],
    items: Iterable[object],
    *,
    workers: int,
    ready: int,
    pin: bool = False,
) -> Iterator[T]:
    """Yields the data set's items, made by the pool, or, without one, by `workers` new processes; 0: by this process.
    Each process keeps `ready` items ready. Raises the DataErrors that the data set raises."""
    if not workers:
        yield from (dataset[item] for item in items)
        return
    described = None if pool is None else pool.describe(dataset)
    if pool is not None and described is not None:
        yield from pool.stream(described, items, ready)
        return
    own = LoaderPool(workers, ready, pin, [dataset])
    try:
        described = own.describe(dataset)
        assert described is not None, "a known object is described by its number"
        yield from own.stream(described, items, ready)
    finally:
        own.close()


# ------------------------------------------------------------------------------------------------------------ processes


def start_loading(
    make: Callable[[Any], T], requests: Iterable[object], workers: int, ready: int, pin: bool = False
) -> Iterator[T | DataError]:
    """Starts processes that call `make` on each request. Returns an iterator of the results, taken by `receive`. Each
    process keeps `ready` results ready. Raises DataError if the processes cannot be started."""
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
    message that ends half-way would block it. The handler of torch raises deaths in any statement, also in one that
    writes a file.
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
        except DataError as error:
            return _Pickled(error)
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
