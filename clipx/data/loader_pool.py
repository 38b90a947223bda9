"""One set of loader processes for training and all evaluations of a rank: they start once, before the first step.

A loader opens a stream of items in the pool. The processes work on the items of the newest stream first, so an
evaluation has all of them. Training items that were requested before are received meanwhile and remain ready.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset

from clipx.data.loader_process import this_process
from clipx.data.loader_processes import receive, start_loading, taken
from clipx.errors import DataError

T = TypeVar("T")

_MOST_BYTES = 2**20
"""Largest description of a data set that is sent with each of its items."""

_LOADED = 8
"""Number of data sets that a loader process keeps."""


class LoaderPool:
    """Loader processes of a rank, which make the items of any data set. Call `close` to end them.

    Args:
        workers: number of processes, at least 1.
        ready: number of items that a process keeps ready, for the stream that needs most.
        pin: whether items are moved to pinned memory.
        known: objects that data sets refer to, such as sources and orders. The processes start with them; all
            other parts of a data set are pickled.
    """

    def __init__(self, workers: int, ready: int, pin: bool, known: Sequence[object]) -> None:
        self.workers = workers
        self._known = {id(one): number for number, one in enumerate(known)}
        self._streams: list[_Stream[Any]] = []  # open ones, the newest last
        self._requested = deque[_Stream[Any] | None]()  # the stream of each item in flight; None: no work
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
        """Yields the described data set's items, in this order. Raises the DataErrors that are among them.

        Each process keeps at most `ready` of them ready.
        """
        stream = _Stream[T](dataset, iter(items), ready * self.workers)
        self._streams.append(stream)
        try:
            # Without a local variable: the shared memory of an item is free as soon as the caller drops it.
            while self._fill(stream):
                yield taken(stream.ready.popleft())
        finally:
            stream.close()
            self._streams.remove(stream)

    def _fill(self, stream: _Stream[Any]) -> bool:
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
class _Stream(Generic[T]):
    """Items of one loader: those that are ready in the trainer, and how many are in flight."""

    dataset: bytes
    items: Iterator[object]
    most: int
    """Largest number of items in flight or ready."""

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


_Request = tuple[bytes, object]
"""Description of a data set, and the item of it that is wanted."""


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
    dataset: Dataset[T | DataError],
    items: Iterable[object],
    *,
    workers: int,
    ready: int,
    pin: bool = False,
) -> Iterator[T]:
    """Yields the data set's items, made by the pool, or, without one, by `workers` new processes; 0: by this process.

    Each process keeps `ready` items ready. New processes also make the items of a data set that the pool cannot. Raises
    the DataErrors that are among the items.
    """
    if not workers:
        yield from (taken(dataset[item]) for item in items)
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
