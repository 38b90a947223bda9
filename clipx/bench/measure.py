"""Measures time, peak memory and collectives of a step."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipx.compat import TorchDispatchMode, schema_of
from clipx.distributed.comm import Comm

K = TypeVar("K")

# -------------------------------------------------------------------------------------------------------- time


def interleaved(
    steps: Mapping[K, Callable[[], object]], rounds: int, comm: Comm, log: Callable[[str], None] | None = None
) -> dict[K, list[float]]:
    """Returns the seconds of each step in each round. Collective. Rounds are reported to `log` as they end.

    The steps of a round run one after the other, in rotating order: a temporary load of the machine slows all steps of
    a round, and the effects of a step on caches and memory reach each of the others.
    """
    names = list(steps)
    times: dict[K, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            comm.barrier()
            times[name].append(seconds(steps[name], comm.device))
        if log is not None:
            log(f"round {i + 1} of {rounds}: {', '.join(f'{name} {turns[-1]:.3g} s' for name, turns in times.items())}")
    return times


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of a step; on CUDA by events, without the wait of the host for the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    synchronize(device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def synchronize(device: torch.device) -> None:
    """Waits for a CUDA device. No effect on other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------------------------ memory

_PAGE = 4096
_M_MMAP_THRESHOLD = -3  # malloc.h


def return_freed_memory() -> None:
    """Makes glibc return freed tensors to the system, so that resident memory is that of the live tensors.

    By default glibc raises its mmap threshold to the size of freed blocks, up to 32 MiB, and caches smaller blocks:
    resident memory then depends on earlier allocations. Call it first in a process. No effect without glibc.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 16 * _PAGE)


def peak_memory(step: Callable[[], object], device: torch.device) -> int:
    """Returns the peak bytes of a step beyond the memory in use before it; at least a page.

    On CUDA: memory of tensors. On Linux: resident memory by the kernel's high-water mark, which is reset first. On
    other systems, or if it cannot be reset: the increase of the mark, which is too low after an earlier higher peak.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return max(_PAGE, torch.cuda.max_memory_allocated(device) - before)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    before = resident("VmRSS") if _reset_high_water() else resident("VmHWM")
    step()
    return max(_PAGE, resident("VmHWM") - before)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident(field: str) -> int:
    """Returns a field of /proc/self/status in bytes: VmRSS, VmHWM or RssAnon."""
    status = Path("/proc/self/status")
    if not status.is_file():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


# -------------------------------------------------------------------------------------------------- collectives

# Prefix of the dispatcher's operator name, without surrounding underscores -> usual name of the collective.
_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
_SUMMING = {"reduce_scatter", "all_reduce", "reduce"}


FORWARD, BACKWARD = "forward", "backward"  # parts of a step


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a collective by a process."""

    part: str  # of the step
    kind: str
    sent: int  # bytes
    received: int  # bytes
    largest: int  # elements of the largest tensor


class Collectives(TorchDispatchMode):
    """Context that records the calls and bytes that a process sends to and receives from its process group.

    Every function of torch.distributed, its autograd variants and C++ callers such as DDP's reducer reach a process
    group through the operators of c10d (`_c10d_functional` for the functional ones), and autograd runs the backward
    under the caller's modes: all collectives of both implementations are counted, none is computed from a formula.
    """

    part: str
    """Part of the step in which the next calls are recorded. The caller sets it."""

    def __init__(self, part: str = FORWARD) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.part = part

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: Sequence[Any], out: Any) -> None:
        name = func.name().split("::")[1].strip("_")
        if name.startswith(("barrier", "wait_tensor", "monitored_barrier")):
            return
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), name)
        sent: list[Tensor] = []
        received = list(_tensors(out)) if func.namespace == "_c10d_functional" else []
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if not argument.name.startswith("output") and kind != "recv":
                sent += _tensors(value)
            if not argument.name.startswith("input") and kind != "send" and func.namespace == "c10d":
                received += _tensors(value)
        largest = max(x.numel() for x in (*sent, *received))
        self.calls.append(Call(self.part, kind, sum(map(_bytes, sent)), sum(map(_bytes, received)), largest))

    @property
    def kinds(self) -> dict[str, dict[str, int]]:
        """Calls, bytes sent and bytes received by kind of collective."""
        found: dict[str, dict[str, int]] = {}
        for call in self.calls:
            row = found.setdefault(call.kind, {"calls": 0, "sent": 0, "received": 0})
            row["calls"] += 1
            row["sent"] += call.sent
            row["received"] += call.received
        return found

    @property
    def largest_gradient(self) -> int:
        """Elements of the largest tensor of the backward pass, or that was summed over the ranks."""
        return max((c.largest for c in self.calls if c.part == BACKWARD or c.kind in _SUMMING), default=0)

    @property
    def bytes(self) -> int:
        """Bytes of the larger side of each kind: the output of an all_gather, the input of a reduce_scatter."""
        rows = (row for kind, row in self.kinds.items() if kind != "send")  # counted as the recv of another rank
        return sum(max(row["sent"], row["received"]) for row in rows)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
