"""Bytes that each objective and each kind of data parallelism moves between ranks in one step.

b samples on each of K ranks, embeddings of width D in float32, P parameters in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from clipx.errors import ConfigError
from clipx.objective.spec import ObjectiveSpec, ObjectiveTraffic

_FLOAT, _LONG = 4, 8  # bytes
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes of DDP's gradient buckets


CollectiveCounts = dict[str, tuple[int, int]]
"""Calls and bytes by kind. Bytes are those of the larger side: the output of an all_gather, the input of an
all_reduce."""


@dataclass(slots=True)
class StepTraffic:
    """Collectives of one step on one rank."""

    loss: CollectiveCounts = field(default_factory=dict)  # between the towers' forward and backward: no overlap
    gradients: CollectiveCounts = field(default_factory=dict)  # overlaps the towers' backward
    rest: CollectiveCounts = field(default_factory=dict)  # before and after the step

    def total(self) -> CollectiveCounts:
        """Returns the sum over the parts."""
        found: CollectiveCounts = {}
        for kinds in (self.loss, self.gradients, self.rest):
            for kind, (calls, size) in kinds.items():
                before = found.get(kind, (0, 0))
                found[kind] = before[0] + calls, before[1] + size
        return found


@dataclass(frozen=True, slots=True)
class StepShape:
    """Quantities that determine the traffic of a step."""

    objective: ObjectiveTraffic
    b: int  # samples on each rank
    ranks: int
    dim: int
    parameters: int  # number of parameters of the model
    buffers: int = 0  # bytes of the model's buffers, which DDP broadcasts from rank 0 before each step
    frozen: int = 0  # number of parameters without gradients

    @property
    def gradients(self) -> int:
        """Bytes of the gradients."""
        return (self.parameters - self.frozen) * _FLOAT

    @property
    def buckets(self) -> int:
        """Number of buckets in which DDP sums the gradients during the backward. An upper bound: DDP does not split
        tensors."""
        return 1 + max(0, -(-(self.gradients - _FIRST_BUCKET) // _BUCKET))


def objective_traffic(spec: ObjectiveSpec, captions: int = 1, compared: bool = False) -> ObjectiveTraffic:
    """Returns the traffic of an objective with so many captions of each sample, which it compares or not.

    Raises ConfigError if its spec does not declare it.
    """
    traffic = spec.exchanged()
    if traffic is None:
        raise ConfigError(
            f"objective={spec.kind} does not declare what it exchanges between ranks: define the property traffic of "
            "its spec, see clipx/objective/spec.py"
        )
    if not compared:
        return traffic
    # Of a row and of each column a log-normaliser and two probabilities, and the loss; a sum of losses has none.
    statistics = traffic.statistics and 3 * (1 + captions) + 1
    return replace(traffic, statistics=statistics, texts=captions, digests=1 + captions)


def ddp_traffic(shape: StepShape) -> StepTraffic:
    """Returns the traffic of data parallelism (DDP)."""
    extra, batch = shape.objective, shape.b * shape.ranks
    gathers = [(1 + extra.texts) * shape.dim * _FLOAT] + ([extra.statistics * _FLOAT] if extra.statistics else [])
    gathers += [extra.digests * _LONG] if extra.digests else []
    gathers += [_LONG, extra.written * _FLOAT] if extra.read else []
    sums = ([batch * extra.read * _FLOAT] if extra.read else []) + ([] if extra.statistics else [_FLOAT])
    sums += [size * _FLOAT for size in (extra.parameters, extra.summed) if size]
    sums += [2 * extra.prototypes * shape.dim * _FLOAT] * extra.updates
    loss = {"all_gather": (len(gathers), batch * sum(gathers)), "all_reduce": (len(sums), sum(sums))}
    buffers = {"broadcast": (1, shape.buffers)} if shape.buffers else {}
    return StepTraffic(
        {kind: found for kind, found in loss.items() if found[0]},
        {"all_reduce": (shape.buckets, shape.gradients)},
        {"all_reduce": (1, _LONG)} | buffers,  # agreement on whether a rank received a signal to stop
    )


def fsdp_traffic(shape: StepShape) -> StepTraffic:
    """Returns the traffic of sharded data parallelism (FSDP): all_gather of the parameters for the forward and again
    for the backward, reduce_scatter of the gradients. Not verified against counted traffic."""
    traffic, size = ddp_traffic(shape), shape.parameters * _FLOAT
    calls = replace(shape, frozen=0).buckets
    traffic.gradients = {"all_gather": (2 * calls, 2 * size), "reduce_scatter": (shape.buckets, shape.gradients)}
    return traffic
