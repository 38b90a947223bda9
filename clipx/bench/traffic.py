"""Measuring processes of the communication and network benchmarks: collectives of a training step, and its time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from clipx.bench.contenders import Contender, in_memory
from clipx.bench.measure import BACKWARD, FORWARD, Call, Collectives, synchronize
from clipx.distributed.comm import Comm
from clipx.objective.spec import ObjectiveSpec
from clipx.plan.traffic import CollectiveCounts
from clipx.run.signals import StopSignals
from clipx.trainer.learner import Learner
from clipx.trainer.profiler import WINDOW, breakdown
from clipx.trainer.spec import RunSpec

GRADIENTS, REST = "gradients", "rest"  # parts of a step, next to forward and backward of the loss
LOSS = (FORWARD, BACKWARD)
_WARM_UP = 2  # steps: in the second DDP rebuilds its buckets, which takes additional collectives


@dataclass(slots=True)
class StepRecord:
    """Measurements of a step with one loss on one rank."""

    calls: list[Call]  # of one step
    times: list[dict[str, float]]  # of each round: see `clipx.trainer.profiler.breakdown`


def measure(
    comm: Comm, run: RunSpec, losses: Mapping[str, ObjectiveSpec], steps: int = 0, rounds: int = 0
) -> dict[str, StepRecord]:
    """Records the collectives of one step of `run` with each loss, and in each round the time of `steps` steps.
    Collective.

    The losses of a round run one after the other in rotating order, each with a separate copy of the model. With
    rounds=0 only the collectives are recorded, and one model is in memory at a time.
    """
    gc.freeze()  # the objects of the imports, which take half a second to search
    names, records, built = list(losses), {}, {}
    for name, loss in losses.items():
        one = in_memory(replace(run, objective=loss), comm)
        one.warm_up(_WARM_UP)
        with one.turn():
            records[name] = StepRecord(_calls(one, comm), [])
        if rounds:
            built[name] = one
        del one
        gc.collect()  # the model is part of a reference cycle
    for i in range(rounds):
        turn = i % len(names)
        for name in [*names[turn:], *names[:turn]]:
            with built[name].turn():
                records[name].times.append(_profiled(built[name], steps, comm))
    return records


def by_kind(calls: Sequence[Call]) -> CollectiveCounts:
    """Returns the number of calls and the bytes of their larger side by kind."""
    kinds = dict.fromkeys(call.kind for call in calls)
    chosen = {kind: [call for call in calls if call.kind == kind] for kind in kinds}
    return {
        kind: (len(some), max(sum(call.sent for call in some), sum(call.received for call in some)))
        for kind, some in chosen.items()
    }


def _calls(one: Contender, comm: Comm) -> list[Call]:
    assert one.learner is not None
    seen = Collectives(REST)
    with seen, _parts(one.learner, seen):
        one.lap(1)
        seen.part = REST
        StopSignals(verbose=False).received_by_any(comm)  # a trainer's agreement after each step
    return seen.calls


@contextlib.contextmanager
def _parts(learner: Learner, seen: Collectives) -> Iterator[None]:
    """Sets the part of `seen` in the learner's steps: forward and backward of the loss, backward of the towers with the
    reduction of their gradients, and the rest."""

    def begins(part: str) -> None:
        seen.part = part

    def embedded(module: object, inputs: object, outputs: Sequence[torch.Tensor]) -> None:
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda _: begins(GRADIENTS))

    hooks = [
        learner.parallel.register_forward_hook(embedded),
        learner.objective.register_forward_pre_hook(lambda *_: begins(FORWARD)),
        learner.objective.register_forward_hook(lambda *_: begins(BACKWARD)),
        learner.optimizer.register_step_pre_hook(lambda *_: begins(REST)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _profiled(one: Contender, steps: int, comm: Comm) -> dict[str, float]:
    """Returns the milliseconds of a step by activity. The profiler makes the step slower."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if comm.device.type == "cuda" else [])]
    comm.barrier()
    with profile(activities=activities) as profiler, record_function(WINDOW):
        one.lap(steps)
        synchronize(comm.device)
    return breakdown(profiler.events() or [], steps)
