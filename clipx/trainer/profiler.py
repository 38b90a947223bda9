"""Profiles a few steps with torch.profiler: a trace, and four numbers from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.config.lazy_torch import torch
from clipx.config.specs import frozen
from clipx.distributed.comm import Comm
from clipx.errors import require
from clipx.storage.local import write_atomically, write_text

if TYPE_CHECKING:
    from torch.profiler import profile

WINDOW = "clipx.profiled_steps"
"""Name of the span of the steps that `breakdown` reads."""

Intervals = list[tuple[float, float]]
"""Disjoint intervals (start, end) in ascending order."""


@frozen
class ProfilerSpec:
    """Traces some steps of rank 0, which slows them down, into the folder `profile` of the run directory."""

    steps: list[int] = field(default_factory=list)
    """First and last step to trace, e.g. [10,12], numbered from 1 as in the log; the last one at most the number of
    steps of the run. []: no trace."""

    def __post_init__(self) -> None:
        ordered = len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]
        require(
            not self.steps or ordered,
            f"profiler.steps={self.steps} must be the first and the last step, e.g. [10,12]; [] disables the profiler",
        )

    def check_fits(self, total: int) -> None:
        """Raises ConfigError if a run of `total` steps has no such steps. A run that resumes after them traces none."""
        require(
            not self.steps or self.steps[1] <= total,
            f"profiler.steps={self.steps} are not among the {total:,} steps of this run: give earlier steps",
        )


class Profiler:
    """Profiler of rank 0. Call `before` and `after` around each step; they have no effect on other ranks."""

    def __init__(self, spec: ProfilerSpec, folder: Path, comm: Comm) -> None:
        self._steps = spec.steps if comm.is_main else []
        self._folder, self._device = folder, comm.device
        self._profile: profile | None = None
        self._window: torch.profiler.record_function | None = None

    def before(self, step: int) -> None:
        """Starts profiling if `step` is the first step to trace. Call it before the step waits for its batch."""
        if step not in self._steps[:1]:
            return
        self._synchronize()
        self._profile = torch.profiler.profile()
        self._profile.start()
        self._window = torch.profiler.record_function(WINDOW)
        self._window.__enter__()

    def after(self, step: int) -> dict[str, float] | None:
        """Stops profiling if `step` is the last step to trace. Returns its `breakdown` then, None otherwise.

        Writes trace.json and breakdown.json.
        """
        if self._profile is None or step != self._steps[1]:
            return None
        assert self._window is not None
        self._synchronize()
        self._window.__exit__(None, None, None)
        self._profile.stop()
        self._folder.mkdir(exist_ok=True)
        write_atomically(self._folder / "trace.json", self._profile.export_chrome_trace)
        steps = self._steps[1] - self._steps[0] + 1
        found = {"steps": steps, **breakdown(self._profile.events() or [], steps)}
        write_text(self._folder / "breakdown.json", json.dumps(found, indent=1) + "\n")
        self._profile = None
        return found

    def close(self) -> None:
        """Stops the profiler if the run stopped within the traced steps."""
        if self._profile is not None and self._window is not None:
            self._window.__exit__(None, None, None)
            self._profile.stop()
            self._profile = None

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def breakdown(events: Iterable[Any], steps: int) -> dict[str, float]:
    """Returns milliseconds per step by activity (as in FastCLIP's figures, arXiv:2407.01445): computation alone,
    communication alone, both, and neither. Their sum is `step_ms`.

    On a GPU, the activity is that of its kernels; on the CPU, that of torch's operators and gloo's collectives.
    """
    events = list(events)
    window = next((e.time_range.start, e.time_range.end) for e in events if e.name == WINDOW)
    kernels = [e for e in events if e.device_type.name != "CPU" and not e.is_user_annotation]
    if kernels:
        talking = [e for e in kernels if "nccl" in e.name.lower()]
        computing = [e for e in kernels if "nccl" not in e.name.lower()]
    else:
        talking = [e for e in events if e.name.startswith("gloo:")]
        computing = [e for e in events if e.name.startswith("aten::")]
    compute, communicate = (union([_within(e, window) for e in some]) for some in (computing, talking))
    both = _length(compute) + _length(communicate) - _length(union([*compute, *communicate]))
    parts = {
        "computation_ms": _length(compute) - both,
        "communication_ms": _length(communicate) - both,
        "overlap_ms": both,
        "other_ms": window[1] - window[0] - _length(union([*compute, *communicate])),
    }
    return {name: us / 1e3 / steps for name, us in {"step_ms": window[1] - window[0], **parts}.items()}


def union(spans: Sequence[tuple[float, float]]) -> Intervals:
    """Returns the union of the spans."""
    found: Intervals = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _within(event: Any, window: tuple[float, float]) -> tuple[float, float]:
    return max(event.time_range.start, window[0]), min(event.time_range.end, window[1])


def _length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
