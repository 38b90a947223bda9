"""Metrics of an interval of training: means on the device, read in one transfer; time by phase; norms of the towers'
gradients and updates; monitors of a suspicious state. docs/reference/metrics.md defines each metric."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from clipx.compat import foreach_sub
from clipx.data.spec import DataSpec
from clipx.distributed.comm import Comm
from clipx.logger import Row
from clipx.model.clip import CLIP
from clipx.objective.base import Metrics, Objective
from clipx.objective.losses.temperature import GlobalTemperature
from clipx.trainer.compile import recompile_limit_hits

if TYPE_CHECKING:
    from clipx.model.flops import Utilisation
    from clipx.trainer.stages import Step

AT_LIMIT_STEPS = 1000  # steps at the limit before a temperature is reported
LARGE_LOG_U = 20.0  # mean of log u: negatives score e^20 times as high as positives, on average over an interval

Item = TypeVar("Item")
Weights = dict[str, list[Tensor]]


class Meter:
    """Collects metrics, throughput and time of the steps between two logs."""

    def __init__(self, comm: Comm, utilisation: Utilisation | None = None) -> None:
        """`utilisation`: of the device by the model; None if its peak is unknown."""
        self.comm, self.utilisation = comm, utilisation
        # For each set of metrics that a step has: their sums and, last, the number of steps. On the device.
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._dtype = torch.float32 if comm.device.type == "mps" else torch.float64  # mps has no float64
        self._seconds = Counter[str]()
        self._utilization = comm.device.type == "cuda" and importlib.util.find_spec("pynvml") is not None
        self._restart()

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continues an interval from `state()`. Throughput and times are those of this process."""
        for steps in dict.fromkeys(steps for _, steps in state.values()):
            sums = {name: total for name, (total, number) in state.items() if number == steps}
            row = torch.tensor([*sums.values(), steps], dtype=self._dtype)
            self._sums[tuple(sums)] = row.to(self.comm.device)

    def state(self) -> dict[str, tuple[float, int]]:
        """Returns (sum, number of steps) of each metric since the last read, in one transfer, without skipped steps."""
        found: dict[str, tuple[float, int]] = {}
        values = iter(torch.cat(list(self._sums.values())).tolist() if self._sums else ())
        for names in self._sums:
            sums, steps = [next(values) for _ in names], int(next(values))
            for name, total in zip(names, sums, strict=True):
                before, steps_before = found.get(name, (0.0, 0))
                found[name] = before + total, steps_before + steps
        return {name: (total, steps) for name, (total, steps) in found.items() if steps}

    def _restart(self) -> None:
        self._sums.clear()
        self._start_clock()

    def _start_clock(self) -> None:
        self._seconds.clear()
        self._samples = self._tokens = self._image_tokens = 0
        self._paused = 0.0
        self._start = time.perf_counter()
        if self.comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.comm.device)

    def waiting(self, items: Iterable[Item]) -> Iterable[Item]:
        """Starts the clock, yields the items, and adds the time spent waiting for each to the phase `data_wait`."""
        self._start_clock()
        iterator = iter(items)
        while True:
            with self.phase("data_wait"):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def add(
        self,
        metrics: Metrics,
        samples: int,
        tokens: int = 0,
        found_inf: Tensor | None = None,
        image_tokens: int = 0,
    ) -> None:
        """Adds a step: its metrics, which stay on the device, its samples over all ranks, and its tokens on this rank.

        `tokens`: of texts. `image_tokens`: of images at their own aspect ratio, 0 for others. `found_inf`: 0-dim, 1 for
        a skipped step, whose metrics do not count. A metric that only some steps have is averaged over these.
        """
        if metrics:
            values = torch.stack([value.detach().to(self.comm.device) for value in metrics.values()]).to(self._dtype)
            row = torch.cat([values, values.new_ones(1)])
            if found_inf is not None:
                row = torch.where(found_inf == 0, row, 0)
            names = tuple(metrics)
            self._sums[names] = self._sums[names] + row if names in self._sums else row
        self._samples += samples
        self._tokens += tokens
        self._image_tokens += image_tokens

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time within the context to `<name>_s`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[f"{name}_s"] += time.perf_counter() - start  # type: ignore[assignment]

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Excludes the time within the context from the throughput, e.g. of evaluations and checkpoints."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def read(self, step: Step | None = None) -> dict[str, float]:
        """Returns the means of the metrics and the throughput of all ranks since the last read, times and memory of
        this rank. The only method that waits for the device. Collective. `step`: the last one that was added."""
        totals = self.state()
        seconds = max(1e-9, time.perf_counter() - self._start - self._paused)
        rate = self._samples / seconds
        own = torch.tensor([self._tokens / seconds, self._image_tokens / seconds], dtype=torch.float64)
        tokens, image_tokens = self.comm.sum(own).tolist()
        out = {
            **{name: total / steps for name, (total, steps) in totals.items()},
            "samples_per_second": rate,
            "samples_per_second_per_device": rate / self.comm.world,
            "tokens_per_second": tokens,
            **({"image_tokens_per_second": image_tokens} if image_tokens else {}),
            "data_wait_share": min(1.0, self._seconds["data_wait_s"] / seconds),
            **self._seconds,
            **self._resources(),
        }
        if self.utilisation is not None and step is not None:
            out |= self.utilisation.metrics(out, self.comm.world, step.image_size, step.patch_dropout)
        self._restart()
        return out

    def _resources(self) -> dict[str, float]:
        """Returns memory and utilization of this rank's process and device."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = {"host_memory_gb": host / 1e9}
        if self.comm.device.type == "cuda":
            found["device_memory_gb"] = torch.cuda.max_memory_allocated(self.comm.device) / 1e9
        if self._utilization:
            try:
                found["device_utilization"] = torch.cuda.utilization(self.comm.device) / 100
            except Exception:  # NVML's own classes: not supported (MIG, vGPU), or another version than the driver's
                self._utilization = False
        return found


# ------------------------------------------------------------------------------------------------- monitors


class Monitors:
    """Calls `event(kind, message=…, step=…)` once for each alarm while its cause lasts."""

    def __init__(self, objective: Objective, event: Callable[..., None], data: DataSpec) -> None:
        self._temperatures = [m for m in objective.modules() if isinstance(m, GlobalTemperature)]
        self._event, self._data = event, data
        self._since: int | None = None  # the step at which a temperature was first seen at its limit
        self._reported: set[str] = set()
        self._hits = recompile_limit_hits()  # of earlier runs of this process

    def check(self, step: int, row: Row) -> None:
        """Checks the current state of the objective and the means since the last log. `row`: the logged metrics."""
        limit = bool(self._temperatures) and bool(torch.stack([t.at_limit() for t in self._temperatures]).any())
        self._since = None if not limit else step if self._since is None else self._since
        stayed = 0 if self._since is None else step - self._since
        self._alarm(
            "temperature_at_limit",
            stayed >= AT_LIMIT_STEPS,
            step,
            f"the temperature has been at its limit for {stayed:,} steps: usual late in a run; early in a run, lower "
            "optimizer.lr",
        )
        self._alarm(
            "recompile_limit",
            recompile_limit_hits() > self._hits,
            step,
            "a compiled function has more variants than torch._dynamo.config.recompile_limit, and further ones run "
            "uncompiled: TORCH_LOGS=recompiles logs their causes",
        )
        log_u = row.get("train/log_u", 0.0)
        self._alarm(
            "large_u",
            log_u > LARGE_LOG_U,
            step,
            f"log u is {log_u:.3g} on average: negatives score far above positives; lower optimizer.lr",
        )

        alarm = self._data.repeated_captions(row.get("train/repeated_captions", 0.0))
        self._alarm("repeated_captions", bool(alarm), step, alarm)

    def _alarm(self, kind: str, on: bool, step: int, message: str) -> None:
        if on and kind not in self._reported:
            self._reported.add(kind)
            self._event(kind, step=step, message=message)
        elif not on:
            self._reported.discard(kind)


# ------------------------------------------------------------------------------------------------- the towers


def towers(model: CLIP) -> Weights:
    """Returns the trained parameters by tower."""
    return {side: [p for p in tower.parameters() if p.requires_grad] for side, tower in model.named_children()}


def gradient_norms(model: CLIP, comm: Comm) -> Metrics:
    """Returns the gradient norm of each tower, on the device. Collective."""
    return {
        f"grad_norm_{side}": comm.norm([p.grad for p in weights if p.grad is not None])
        for side, weights in towers(model).items()
        if any(p.grad is not None for p in weights)
    }


@torch.no_grad()
def update_norms(model: CLIP, before: Weights, comm: Comm) -> Metrics:
    """Returns the norm of each tower's update as a share of the norm of its weights. Collective.

    `before`: the weights before the step.
    """
    return {
        f"update_{side}": comm.norm(foreach_sub(weights, before[side])) / comm.norm(before[side])
        for side, weights in towers(model).items()
        if weights
    }


@torch.no_grad()
def clone_weights(model: CLIP) -> Weights:
    """Returns a copy of the trained parameters by tower."""
    return {side: [p.detach().clone() for p in weights] for side, weights in towers(model).items()}
