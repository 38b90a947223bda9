"""What a step takes of a device's memory, by part, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch

from clipx.config.duration import Length
from clipx.distributed.comm import Comm
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec
from clipx.model.blocks import named_blocks
from clipx.model.clip import parameter_count
from clipx.objective.base import Objective
from clipx.objective.spec import TiledSpec
from clipx.optimizer.groups import parameter_groups
from clipx.plan.dry import DryRun, TowerMemory, state_bytes, stored_bytes
from clipx.plan.spec import PlanSpec
from clipx.precision.spec import Float8Spec, Fp32Spec, Int8Spec, PrecisionSpec

_LINE = (512, 1024)  # samples between which a dry run gives what one more takes: so many that gradients hide nothing
_TILES = 3  # of scores that live at the same time


@dataclass(frozen=True, slots=True)
class Memory:
    """`activations`, `gradients`, `gathered`, `loss` are not all there at once: the step's worst moment is `peak`."""

    weights: int  # with their float32 masters, where there are any
    optimizer: int
    average: int
    per_sample: int  # the objective's own state
    batch: int
    buckets: int  # DDP's copies of the gradients
    peak: int
    activations: int = field(metadata={"part_of": "peak"})
    gradients: int = field(metadata={"part_of": "peak"})
    gathered: int = field(metadata={"part_of": "peak"})  # FSDP: of the weights that others keep
    loss: int = field(metadata={"part_of": "peak"})

    @property
    def total(self) -> int:
        return sum(int(getattr(self, f.name)) for f in fields(self) if "part_of" not in f.metadata)


class MemoryModel:
    """Of a run on any number of devices. The model is built once, without memory."""

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        self.precision = _on_cpu(spec.precision).build(torch.device("cpu"))
        self.dry = DryRun(spec.model, self.precision, _least_patch_dropout(spec))
        groups = parameter_groups(self.dry.model, self.objective(1, spec.data.batch_size), spec.optimizer)
        self.optimizer = state_bytes(groups, spec.optimizer.build, self.precision.stored)
        self._line: tuple[TowerMemory, TowerMemory] | None = None

    def towers(self, samples: int) -> TowerMemory:
        return self.dry.memory(samples, self.spec.tokens)

    def objective(self, ranks: int, batch: int) -> Objective:
        """Without memory, of one of `ranks` devices."""
        samples = self.spec.data_samples or batch
        with torch.device("meta"):
            return self.spec.objective.build(_comm(ranks, "meta"), Length(samples, batch, samples))

    def memory(self, ranks: int, towers: TowerMemory) -> Memory:
        """Of one of `ranks` devices, whose micro-batch is that of `towers`."""
        spec, model = self.spec, self.dry.model
        b = towers.samples * spec.data.micro_batches
        gradients, loss = sum(p.nbytes for p in model.parameters() if p.requires_grad), self._loss(ranks, b)
        masters = self._masters()
        backward = towers.peak if spec.data.micro_batches == 1 else towers.peak_again
        stepping = gradients + masters + stored_bytes(model) + masters  # a logged step keeps the weights from before it
        unsharded = Memory(
            weights=stored_bytes(model) + masters,
            optimizer=self.optimizer,
            average=0 if spec.optimizer.ema_decay is None else masters or stored_bytes(model),
            per_sample=stored_bytes(self.objective(ranks, b * ranks)),
            batch=b * 3 * spec.model.image.size**2,
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
        """The float32 weights that the optimizer steps, where others compute."""
        precision, numbers = self.precision, parameter_count(self.dry.model)
        return int(numbers * precision.stored.itemsize) if precision.master_weights else 0

    def _sharded(self, unsharded: Memory, spec: FsdpSpec, ranks: int) -> Memory:
        """Each device keeps its part, and gathers two blocks at a time, or keeps all that it has gathered."""
        parts = spec.shard_size or ranks
        blocks = [stored_bytes(block) for block in named_blocks(self.dry.model).values()]
        rest = stored_bytes(self.dry.model) - sum(blocks)
        largest = max([*blocks, rest])
        dtype = spec.param_dtype.dtype() or self.precision.dtype
        share = dtype.itemsize / self.precision.dtype.itemsize
        every = stored_bytes(self.dry.model)
        gathered = round(share * (min(2 * largest, every) if spec.reshard_after_forward else every))
        gradients = unsharded.gradients // parts
        here = not spec.cpu_offload
        return replace(
            unsharded,
            weights=here * unsharded.weights // parts,
            optimizer=here * unsharded.optimizer // parts,
            average=here * unsharded.average // parts,
            buckets=0,
            peak=unsharded.activations + gathered + max(unsharded.loss, largest + here * gradients),
            gradients=gradients,
            gathered=gathered,
        )

    def _loss(self, ranks: int, b: int) -> int:
        """Embeddings of all ranks, own embeddings and their gradients, and the tiles of scores."""
        spec, batch = self.spec, b * ranks
        comm = _comm(ranks, "cpu" if spec.distributed.device == "cpu" else "cuda")
        tile = batch  # of an objective that does not cut the matrix of pairs
        if isinstance(spec.objective, TiledSpec):
            tile = spec.objective.tile_size(comm, Length(batch, batch, batch))
        gathered = 2 * (batch + b) if ranks > 1 else 0
        own = 3 * 2 * b
        scores = _TILES * min(tile, b) * min(tile, batch)
        return int(self.precision.wide.itemsize) * ((gathered + own) * self.dry.model.embed_dim + scores)

    def needed(self, ranks: int, samples: int) -> float:
        """Bytes of one of `ranks` devices with micro-batches of so many samples, by the line through two dry runs."""
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
        """The largest micro-batch of which a device's memory holds all; 0 where it holds not one sample."""
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
    """The format as the CPU has it: with tensors of the same types."""
    if isinstance(spec, Fp32Spec):
        return replace(spec, tf32=False)
    return replace(spec, emulate=True) if isinstance(spec, Float8Spec | Int8Spec) else spec


def _least_patch_dropout(spec: PlanSpec) -> float:
    """The smallest share of patches that the run leaves out: its most expensive steps are what is planned."""
    model = spec.model
    if model.patch_dropout_final != "none":
        return 0.0
    return min(model.patch_dropout, model.patch_dropout_end or model.patch_dropout)
