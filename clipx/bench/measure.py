"""Measures time and peak memory of a step."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

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
