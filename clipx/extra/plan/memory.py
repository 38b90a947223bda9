"""Memory of a device during a step, by part, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch

from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec
from clipx.extra.plan.command import PlanSpec
from clipx.extra.plan.dry import DryRun, TowerMemory, state_bytes, stored_bytes
from clipx.model.clip import parameter_count
from clipx.model.layers import named_blocks
from clipx.objective.base import ModelFacts, Objective
from clipx.objective.spec import TiledSpec
from clipx.optimizer.groups import parameter_groups
from clipx.precision.quantized import QuantizedSpec
from clipx.precision.spec import Fp32Spec, PrecisionSpec

# Samples of the two dry runs that give the memory of a further sample. So many that activations exceed the gradients.
_LINE = (512, 1024)
_SPLIT_BYTES = 6  # three float16 numbers for each of an embedding, where the products of the loss are split
_TILES = 3  # tiles of scores that are live at the same time
_COMPARED_TILES = 7  # the same where captions are compared, with three tiles of bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory by part. `activations`, `gradients`, `gathered` and `loss` are not live all at once: `peak` is the
    maximum."""

    weights: int  # with float32 master weights, if there are any
    optimizer: int
    average: int  # moving average of the weights
    per_sample: int  # state of the objective
    batch: int  # images of a step and of the next one
    buckets: int  # DDP's copies of the gradients
    peak: int  # maximum over a step, without the parts above
    activations: int = field(metadata={"part_of": "peak"})
    gradients: int = field(metadata={"part_of": "peak"})
    gathered: int = field(metadata={"part_of": "peak"})  # FSDP: weights gathered from other ranks
    loss: int = field(metadata={"part_of": "peak"})

    @property
    def total(self) -> int:
        return sum(int(getattr(self, f.name)) for f in fields(self) if "part_of" not in f.metadata)


class MemoryModel:
    """Memory of a run on any number of devices. Builds the model once, without memory."""

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        self.precision = _on_cpu(spec.precision).build(torch.device("cpu"))
        self.dry = DryRun(spec.model, self.precision, _least_patch_dropout(spec), texts=spec.texts)
        groups = parameter_groups(self.dry.model, self.objective(1, spec.data.batch_size), spec.optimizer)
        self.optimizer = state_bytes(groups, spec.optimizer.build, self.precision.stored)
        self._line: tuple[TowerMemory, TowerMemory] | None = None

    def towers(self, samples: int) -> TowerMemory:
        """Counts the memory of the towers for a micro-batch by a dry run."""
        return self.dry.memory(samples, self.spec.tokens)

    def objective(self, ranks: int, batch: int) -> Objective:
        """Builds the objective of one of `ranks` devices without memory."""
        samples = self.spec.samples or batch
        with torch.device("meta"):
            objective = self.spec.objective.build(_comm(ranks, "meta"), Length(samples, batch, samples))
            objective.prepare(None, ModelFacts.of(self.dry.model))
        return objective

    def memory(self, ranks: int, towers: TowerMemory) -> Memory:
        """Returns the memory of one of `ranks` devices with the micro-batch of `towers`."""
        spec, model = self.spec, self.dry.model
        b = towers.samples * spec.data.micro_batches
        gradients, loss = sum(p.nbytes for p in model.parameters() if p.requires_grad), self._loss(ranks, b)
        masters = self._masters()
        backward = towers.peak if spec.data.micro_batches == 1 else towers.peak_again
        stepping = gradients + masters + stored_bytes(model) + masters  # a logged step copies the weights before it
        unsharded = Memory(
            weights=stored_bytes(model) + masters,
            optimizer=self.optimizer,
            average=0 if spec.optimizer.ema_decay is None else masters or stored_bytes(model),
            per_sample=stored_bytes(self.objective(ranks, b * ranks)),
            batch=2 * model.image.example(b, torch.device("meta")).nbytes,  # the next one is copied in a step
            buckets=gradients if ranks > 1 else 0,
            peak=max(backward, towers.activations + loss, stepping),
            activations=towers.activations,
            gradients=gradients,
            gathered=0,
            loss=loss,
        )
        if isinstance(spec.distributed, FsdpSpec):
            return self._sharded(unsharded, spec.distributed, ranks)
        views = isinstance(spec.distributed, DdpSpec) and spec.distributed.gradient_as_bucket_view
        return replace(unsharded, buckets=0) if views else unsharded

    def _masters(self) -> int:
        """Returns the bytes of the float32 master weights, 0 if the model computes with float32 weights."""
        precision, numbers = self.precision, parameter_count(self.dry.model)
        return int(numbers * precision.stored.itemsize) if precision.master_weights else 0

    def _sharded(self, unsharded: Memory, spec: FsdpSpec, ranks: int) -> Memory:
        """Returns the memory under FSDP: shards, and two gathered blocks, or all blocks without
        reshard_after_forward."""
        parts = spec.shard_size or ranks
        blocks = [stored_bytes(block) for block in named_blocks(self.dry.model).values()]
        rest = stored_bytes(self.dry.model) - sum(blocks)
        largest = max([*blocks, rest])
        weights = self.precision.dtype
        share = spec.gathered_dtype(weights, self.precision.autocast_dtype).itemsize / weights.itemsize
        whole = stored_bytes(self.dry.model)
        gathered = round(share * (min(2 * largest, whole) if spec.reshard_after_forward else whole))
        gradients = unsharded.gradients // parts
        on_device = not spec.cpu_offload
        return replace(
            unsharded,
            weights=on_device * unsharded.weights // parts,
            optimizer=on_device * unsharded.optimizer // parts,
            average=on_device * unsharded.average // parts,
            buckets=0,
            peak=unsharded.activations + gathered + max(unsharded.loss, largest + on_device * gradients),
            gradients=gradients,
            gathered=gathered,
        )

    def _loss(self, ranks: int, b: int) -> int:
        """Returns the bytes of the gathered embeddings, the local embeddings and their gradients, and tiles of
        scores."""
        spec, batch = self.spec, b * ranks
        comm = _comm(ranks, "cpu" if spec.distributed.device == "cpu" else "cuda")
        tile = batch  # an objective without tiles computes the whole matrix of pairs
        split = 0  # bytes of the float16 halves of an embedding
        if isinstance(spec.objective, TiledSpec):
            length = Length(batch, batch, batch)
            tile = spec.objective.tile_size(comm, length)
            split = _SPLIT_BYTES * spec.objective.splits(comm, length)
        texts = spec.texts
        gathered = (1 + texts) * (batch + b) if ranks > 1 else 0
        local = 3 * (1 + texts) * b
        scores = (
            (_COMPARED_TILES if spec.compares_captions else _TILES) * min(tile, b * texts) * min(tile, batch * texts)
        )
        width = self.dry.model.embed_dim
        return (
            int(self.precision.wide.itemsize) * ((gathered + local) * width + scores)
            + split * (1 + texts) * batch * width
        )

    def needed(self, ranks: int, samples: int) -> float:
        """Returns the bytes of one of `ranks` devices with micro-batches of `samples`, linearly from two dry runs."""
        if self._line is None:
            self._line = self.towers(_LINE[0]), self.towers(_LINE[1])
        low, high = self._line
        at = (samples - low.samples) / (high.samples - low.samples)

        def interpolate(name: str) -> int:
            first, last = int(getattr(low, name)), int(getattr(high, name))
            return max(0, round(first + at * (last - first)))

        names = ("activations", "peak", "peak_again")
        return self.memory(ranks, TowerMemory(samples, *(interpolate(name) for name in names))).total

    def largest(self, ranks: int, limit: float) -> int:
        """Returns the largest micro-batch that fits into `limit` bytes. 0 if not even one sample fits."""
        low, high = 0, 1
        while self.needed(ranks, high) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needed(ranks, middle) <= limit else (low, middle)
        return low


def _comm(ranks: int, device: str) -> Comm:
    return Comm(0, ranks, 0, torch.device(device))


def _on_cpu(spec: PrecisionSpec) -> PrecisionSpec:
    """Returns the precision for the CPU, with tensors of the same dtypes."""
    if isinstance(spec, Fp32Spec):
        return replace(spec, tf32=False)
    return replace(spec, emulate=True) if isinstance(spec, QuantizedSpec) else spec


def _least_patch_dropout(spec: PlanSpec) -> float:
    """Returns the smallest patch dropout of the run, for the plan covers its most expensive steps."""
    model = spec.model
    if model.patch_dropout_final != "none":
        return 0.0
    return min(model.patch_dropout, model.patch_dropout_end or model.patch_dropout)
