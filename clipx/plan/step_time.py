"""The time of a training step on a cluster that need not be there: arithmetic, and the model of its network."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.objective.spec import ObjectiveTraffic
from clipx.plan.alpha_beta import Cluster, Link
from clipx.plan.traffic import CollectiveCounts, StepShape, ddp_traffic, fsdp_traffic


@dataclass(frozen=True, slots=True)
class Model:
    """What a step's time depends on."""

    parameters: int
    flops: float  # of a sample's forward, both towers
    dim: int
    buffers: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Assumed, or measured elsewhere."""

    gpus_per_node: int
    within: Link
    between: Link
    flops: float  # a second, that the towers reach
    loss_flops: float  # that the loss reaches, in float32

    def cluster(self, gpus: int) -> Cluster:
        of_node = min(gpus, self.gpus_per_node)
        return Cluster(gpus // of_node, of_node, self.within, self.between)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step on one of `gpus`, and what they are made of."""

    gpus: int
    batch: int  # of all
    towers: float
    loss: float  # the pairs that this GPU scores
    gathers: float  # of embeddings and statistics
    gradients: float  # summed over all, were nothing hidden
    exposed: float  # what of them the backward does not hide
    rest: float

    @property
    def seconds(self) -> float:
        return self.towers + self.loss + self.gathers + self.exposed + self.rest

    @property
    def without_overlap(self) -> float:
        """Seconds where communication and computation take turns."""
        return self.seconds - self.exposed + self.gradients

    @property
    def rate(self) -> float:
        """Samples a second, of all GPUs."""
        return self.batch / self.seconds

    def efficiency(self, smallest: Step) -> float:
        """Samples a second and GPU, to those of the smallest."""
        return (self.rate / self.gpus) / (smallest.rate / smallest.gpus)


def step(model: Model, machine: Machine, objective: ObjectiveTraffic, gpus: int, b: int, fsdp: bool = False) -> Step:
    """One micro-batch of `b` samples on each GPU.

    Forward and backward of the towers are three forwards, the loss 6·b·B·D multiplications and additions of each. The
    gradients' collectives run beside the backward (under FSDP, beside forward and backward), but for the last part,
    which is ready only when it has ended. Loader, optimizer and evaluation are left out.
    """
    cluster, batch = machine.cluster(gpus), b * gpus
    shape = StepShape(objective, b, gpus, model.dim, model.parameters, model.buffers)
    moved = (fsdp_traffic if fsdp else ddp_traffic)(shape)
    towers = 3 * model.flops * b / machine.flops
    gradients = _time(cluster, moved.gradients)
    hidden = towers if fsdp else towers * 2 / 3
    return Step(
        gpus,
        batch,
        towers,
        12 * b * batch * model.dim / machine.loss_flops,
        _time(cluster, moved.loss),
        gradients,
        max(gradients / shape.buckets, gradients - hidden),
        _time(cluster, moved.rest),
    )


def _time(cluster: Cluster, kinds: CollectiveCounts) -> float:
    return sum(cluster.time(kind, calls, size) for kind, (calls, size) in kinds.items())
