"""What an interval of training measured: means on the device, read in one transfer; time spent, and spent waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from clipx.distributed import Comm

Item = TypeVar("Item")


class Meter:
    """Collects the steps between two logs."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._sums: dict[str, Tensor] = {}
        self._restart()

    def _restart(self) -> None:
        self._sums.clear()
        self._steps = self._samples = 0  # steps that were made; samples of the others count
        self._waited = self._paused = 0.0
        self._start = time.perf_counter()

    def waiting(self, items: Iterable[Item]) -> Iterable[Item]:
        """The items, timing how long each is waited for."""
        iterator = iter(items)
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - start
            yield item

    def add(self, metrics: dict[str, Tensor], samples: int) -> None:
        """A step's metrics, left on the device, and its samples over all ranks. No metrics: it was left out."""
        for name, value in metrics.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._steps += bool(metrics)
        self._samples += samples

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Leaves out the time that goes into evaluating and saving."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Means of the metrics and the throughput since the last read. The one place that waits for the device."""
        names = list(self._sums)
        means = (torch.stack([self._sums[name] for name in names]) / self._steps).tolist() if names else []
        seconds = max(1e-9, time.perf_counter() - self._start - self._paused)
        rate = self._samples / seconds
        out = {
            **dict(zip(names, means, strict=True)),
            "samples_per_second": rate,
            "samples_per_second_per_device": rate / self.comm.world,
            "data_wait_share": min(1.0, self._waited / seconds),
        }
        self._restart()
        return out
