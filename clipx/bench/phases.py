"""Time of a step of clipx by phase, and on CUDA without a kernel."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from clipx.bench.contenders import Contender
from clipx.trainer.learner import Learner
from clipx.trainer.profiler import union

PHASES = ("data", "forward", "loss", "backward", "optimizer", "other")


class Timeline:
    """Marks of a step, each the begin of a phase that ends at the next one. On CUDA in the time of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # with seconds, or an event of CUDA

    def mark(self, phase: str) -> None:
        now: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            now.record()
        self._marks.append((phase, now))

    def milliseconds(self) -> dict[str, float]:
        """Returns the time of each phase over all steps."""
        if self._cuda:
            torch.cuda.synchronize()
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in itertools.pairwise(self._marks):
            found[phase] += start.elapsed_time(end) if self._cuda else 1e3 * (end - start)
        return found


@contextlib.contextmanager
def marked(learner: Learner, line: Timeline) -> Iterator[None]:
    """Marks the phases of the learner's steps. `data`, up to the first forward pass, includes the wait for the batch's
    transfer; `backward` also the gradient norm; forward passes of micro-batches in the backward pass are `forward`."""
    scored = False

    def ends(phase: str, loss: bool) -> None:
        nonlocal scored
        scored = loss
        line.mark(phase)

    hooks = [
        learner.parallel.register_forward_pre_hook(lambda *_: line.mark("forward")),
        learner.parallel.register_forward_hook(lambda *_: line.mark("backward" if scored else "other")),
        learner.objective.register_forward_pre_hook(lambda *_: line.mark("loss")),
        learner.objective.register_forward_hook(lambda *_: ends("backward", True)),
        learner.optimizer.register_step_pre_hook(lambda *_: line.mark("optimizer")),
        learner.optimizer.register_step_post_hook(lambda *_: ends("other", False)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def phases(contender: Contender, steps: int, device: torch.device) -> dict[str, float]:
    """Returns the milliseconds of a step by phase, over a turn of `steps`."""
    learner = contender.learner
    if learner is None:
        return {}
    line = Timeline(device)
    with contender.turn(), marked(learner, line):
        for _ in range(steps):
            line.mark("data")
            contender.lap(1)
        line.mark("end")
    return {phase: round(took / steps, 3) for phase, took in line.milliseconds().items()}


def idle(contender: Contender, steps: int, seconds: float) -> float:
    """Returns the milliseconds of a step in which no kernel runs.

    `seconds` is the time of a step without the profiler, which slows the host and not the kernels: the result is the
    part of it that the kernels leave.
    """
    with contender.turn(), torch.profiler.profile() as profile:
        contender.lap(steps)
        torch.cuda.synchronize()
    events = [e for e in profile.events() or [] if e.device_type.name == "CUDA" and not e.is_user_annotation]
    busy = union([(e.time_range.start, e.time_range.end) for e in events])
    return round(max(0.0, 1e3 * seconds - sum(end - start for start, end in busy) / 1e3 / steps), 3)
