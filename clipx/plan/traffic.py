"""Bytes that each objective and each kind of data parallelism moves between ranks in one step.

b samples on each of K ranks, embeddings of width D in float32, P parameters in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clipx.errors import ConfigError
from clipx.objective.spec import ObjectiveSpec, ObjectiveTraffic

_FLOAT, _LONG = 4, 8  # bytes
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes of gradients that DDP sums together


CollectiveCounts = dict[str, tuple[int, int]]
"""Calls and bytes of the larger side, by kind: what an all_gather yields, what an all_reduce sums."""


@dataclass(slots=True)
class Traffic:
    """Of one step on one rank."""

    loss: CollectiveCounts = field(default_factory=dict)  # between the towers' forward and backward: nothing hides it
    gradients: CollectiveCounts = field(default_factory=dict)  # beside the towers' backward
    rest: CollectiveCounts = field(default_factory=dict)  # before and after

    def total(self) -> CollectiveCounts:
        found: CollectiveCounts = {}
        for kinds in (self.loss, self.gradients, self.rest):
            for kind, (calls, size) in kinds.items():
                had = found.get(kind, (0, 0))
                found[kind] = had[0] + calls, had[1] + size
        return found


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's traffic depends on."""

    objective: ObjectiveTraffic
    b: int
    ranks: int
    dim: int
    parameters: int  # of the model
    buffers: int = 0  # bytes of the model's, which DDP sends from the first rank before each step

    @property
    def buckets(self) -> int:
        """Parts in which DDP sums the gradients, to begin before the backward has ended. A tensor is never cut, so that
        there may be fewer."""
        return 1 + max(0, -(-(self.parameters * _FLOAT - _FIRST_BUCKET) // _BUCKET))


def objective_traffic(spec: ObjectiveSpec) -> ObjectiveTraffic:
    """What the objective exchanges between ranks. Raises ConfigError where its spec does not say it."""
    if spec.traffic is None:
        raise ConfigError(
            f"objective={spec.kind} does not say what it exchanges between ranks: define the property traffic of its "
            "spec, as clipx/objective/spec.py describes it"
        )
    return spec.traffic


def ddp_traffic(shape: StepShape) -> Traffic:
    """Data parallel (DDP)."""
    extra, batch = shape.objective, shape.b * shape.ranks
    gathers = [2 * shape.dim * _FLOAT] + ([extra.statistics * _FLOAT] if extra.statistics else [])
    gathers += [_LONG, extra.written * _FLOAT] if extra.read else []
    sums = ([batch * extra.read * _FLOAT] if extra.read else []) + ([] if extra.statistics else [_FLOAT])
    sums += [extra.parameters * _FLOAT] if extra.parameters else []
    loss = {"all_gather": (len(gathers), batch * sum(gathers)), "all_reduce": (len(sums), sum(sums))}
    buffers = {"broadcast": (1, shape.buffers)} if shape.buffers else {}
    return Traffic(
        {kind: found for kind, found in loss.items() if found[0]},
        {"all_reduce": (shape.buckets, shape.parameters * _FLOAT)},
        {"all_reduce": (1, _LONG)} | buffers,  # whether any rank was told to stop
    )


def fsdp_traffic(shape: StepShape) -> Traffic:
    """Sharded data parallel (FSDP): parameters are gathered for the forward and once more for the backward, their
    gradients reduced and scattered. Not compared with a count."""
    traffic, size = ddp_traffic(shape), shape.parameters * _FLOAT
    traffic.gradients = {"all_gather": (2 * shape.buckets, 2 * size), "reduce_scatter": (shape.buckets, size)}
    return traffic
