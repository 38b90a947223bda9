"""Predicted time of a training step on a cluster: FLOPs, and the alpha-beta model of its network."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.objective.spec import ObjectiveTraffic
from clipx.plan.alpha_beta import Cluster, Link
from clipx.plan.traffic import StepShape, ddp_traffic, fsdp_traffic


@dataclass(frozen=True, slots=True)
class Model:
    """Properties of a model that determine the time of a step."""

    parameters: int
    flops: float  # forward of a sample through both towers
    dim: int
    buffers: int = 0  # bytes
    frozen: int = 0  # number of parameters without gradients


@dataclass(frozen=True, slots=True)
class Machine:
    """Assumed or measured properties of a cluster."""

    gpus_per_node: int
    within: Link
    between: Link
    flops: float  # FLOP/s that the towers reach
    loss_flops: float  # FLOP/s that the loss reaches in float32

    def cluster(self, gpus: int) -> Cluster:
        """Returns the network of `gpus` GPUs, in full nodes."""
        of_node = min(gpus, self.gpus_per_node)
        return Cluster(gpus // of_node, of_node, self.within, self.between)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step on one of `gpus`, by part."""

    gpus: int
    batch: int  # global batch
    towers: float  # forward and backward of the towers
    loss: float  # pairs that this GPU scores
    gathers: float  # collectives of embeddings and statistics
    gradients: float  # collectives of gradients, without overlap
    exposed: float  # part of `gradients` that does not overlap the backward
    rest: float  # other collectives

    @property
    def seconds(self) -> float:
        return self.towers + self.loss + self.gathers + self.exposed + self.rest

    @property
    def rate(self) -> float:
        """Samples per second of all GPUs."""
        return self.batch / self.seconds


def step(model: Model, machine: Machine, objective: ObjectiveTraffic, gpus: int, b: int, fsdp: bool = False) -> Step:
    """Predicts a step with one micro-batch of `b` samples on each GPU.

    Forward and backward of the towers cost three forwards; the loss costs 6·b·B·D multiplications and as many
    additions, for each text of a sample. The gradients' collectives overlap the backward (under FSDP, forward and
    backward), except for the last bucket, which is ready only after the backward. Loader, optimizer and evaluation are
    not included.
    """
    shape = StepShape(objective, b, gpus, model.dim, model.parameters, model.buffers, model.frozen)
    moved = (fsdp_traffic if fsdp else ddp_traffic)(shape)
    cluster, batch = machine.cluster(gpus), b * gpus
    towers = 3 * model.flops * b / machine.flops
    gradients = cluster.total(moved.gradients)
    hidden = towers if fsdp else towers * 2 / 3
    return Step(
        gpus,
        batch,
        towers,
        12 * b * batch * objective.texts * model.dim / machine.loss_flops,
        cluster.total(moved.loss),
        gradients,
        max(gradients / shape.buckets, gradients - hidden),
        cluster.total(moved.rest),
    )
