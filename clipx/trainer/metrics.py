"""What an interval of training measured: means on the device, read in one transfer; time spent, and on what; how far
the towers moved. docs/metrics.md defines each number."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.model.clip import CLIP
from clipx.model.text import end_positions
from clipx.objective.base import Metrics

Item = TypeVar("Item")
Weights = dict[str, list[Tensor]]


class Meter:
    """Collects the steps between two logs."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._sums: dict[str, Tensor] = {}
        self._counts = Counter[str]()  # of the steps that gave each metric
        self._seconds = Counter[str]()
        self._utilization = comm.device.type == "cuda" and importlib.util.find_spec("pynvml") is not None
        self._restart()

    def _restart(self) -> None:
        for counted in (self._sums, self._counts, self._seconds):
            counted.clear()
        self._samples = self._tokens = 0
        self._paused = 0.0
        self._start = time.perf_counter()
        if self.comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.comm.device)

    def waiting(self, items: Iterable[Item]) -> Iterable[Item]:
        """The items, timing how long each is waited for."""
        iterator = iter(items)
        while True:
            with self.phase("data_wait"):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def add(self, metrics: Metrics, samples: int, tokens: int = 0) -> None:
        """A step's metrics, left on the device, its samples over all ranks, and its tokens on this rank.

        No metrics: it was left out. A metric that not every step has is averaged over those that have it.
        """
        for name, value in metrics.items():
            value = value.detach().to(self.comm.device, torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts.update(metrics.keys())
        self._samples += samples
        self._tokens += tokens

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time in it to `<name>_s`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[f"{name}_s"] += time.perf_counter() - start  # type: ignore[assignment]

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Leaves out the time that goes into evaluating and saving."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Means of the metrics and the throughput since the last read. The one place that waits for the device."""
        names = list(self._sums)
        sums = torch.stack([self._sums[name] for name in names]).tolist() if names else []
        seconds = max(1e-9, time.perf_counter() - self._start - self._paused)
        rate = self._samples / seconds
        out = {
            **{name: total / self._counts[name] for name, total in zip(names, sums, strict=True)},
            "samples_per_second": rate,
            "samples_per_second_per_device": rate / self.comm.world,
            "tokens_per_second": self._tokens / seconds,  # on this rank
            "data_wait_share": min(1.0, self._seconds["data_wait_s"] / seconds),
            **self._seconds,
            **self._resources(),
        }
        self._restart()
        return out

    def _resources(self) -> dict[str, float]:
        """Of this rank's process and device."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = {"host_memory_gb": host / 1e9}
        if self.comm.device.type == "cuda":
            found["device_memory_gb"] = torch.cuda.max_memory_allocated(self.comm.device) / 1e9
        if self._utilization:
            found["device_utilization"] = torch.cuda.utilization(self.comm.device) / 100
        return found


# ------------------------------------------------------------------------------------------------- the towers


def towers(model: CLIP) -> Weights:
    """The parameters that are trained, by tower."""
    return {side: [p for p in tower.parameters() if p.requires_grad] for side, tower in model.named_children()}


def gradient_norms(model: CLIP, comm: Comm) -> Metrics:
    """Of each tower, left on the device."""
    return {
        f"grad_norm_{side}": comm.norm([p.grad for p in weights if p.grad is not None])
        for side, weights in towers(model).items()
        if any(p.grad is not None for p in weights)
    }


@torch.no_grad()
def update_norms(model: CLIP, before: Weights, comm: Comm) -> Metrics:
    """How far a step moved each tower's weights, as a share of their norm; `before` it they were these."""
    return {
        f"update_{side}": comm.norm(torch._foreach_sub(weights, before[side])) / comm.norm(before[side])
        for side, weights in towers(model).items()
        if weights
    }


@torch.no_grad()
def clone_weights(model: CLIP) -> Weights:
    """The weights as they are now."""
    return {side: [p.detach().clone() for p in weights] for side, weights in towers(model).items()}


def tokens_computed(tokens_BL: Tensor, packed: bool) -> int:
    """How many of them the text tower computes; packed, none after a text's end. On the host."""
    if not packed or not tokens_BL.shape[1]:
        return tokens_BL.numel()
    return int(end_positions(tokens_BL).sum()) + len(tokens_BL)
