"""Plan of a run: counted numbers and the predictions from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clipx.config.duration import Length
from clipx.distributed.ddp import Compression, DdpSpec
from clipx.errors import ConfigError
from clipx.extra.plan.command import RESERVE_GB, PlanSpec
from clipx.extra.plan.dry import Flops
from clipx.extra.plan.memory import Memory, MemoryModel
from clipx.extra.plan.traffic import StepShape, StepTraffic, ddp_traffic, fsdp_traffic, objective_traffic
from clipx.extra.plan.utilisation import Speed, loss_speed, tower_speed
from clipx.model.batchnorm import BATCH_NORM
from clipx.model.clip import CLIP, frozen_count, parameter_count


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """Predicted time of a run at one speed of the towers. The network is not included (docs/guides/scaling.md)."""

    gpus: int
    batch: int  # global batch
    towers: float  # seconds of forward and backward of the towers in a step
    loss: float  # seconds of the pairs that a device scores in a step
    steps: int | None  # number of steps of the run; None if its length is unknown
    price: float | None  # of a GPU-hour

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.towers + self.loss

    @property
    def rate(self) -> float:
        """Samples per second of all devices."""
        return self.batch / self.seconds

    @property
    def hours(self) -> float | None:
        return None if self.steps is None else self.steps * self.seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.gpus

    @property
    def cost(self) -> float | None:
        return None if self.price is None or self.gpu_hours is None else self.price * self.gpu_hours


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of a run, in bytes and FLOPs, for one device and one step unless noted."""

    spec: PlanSpec
    ranks: int
    parameters: dict[str, int]  # number of parameters of image, text, objective
    trained: int  # number of parameters that are trained
    forward: Flops  # of a sample whose text fills the context
    sample_flops: float  # forward of a sample whose text has the mean length
    flops: float  # one step, with the forwards that micro-batches compute twice
    memory: Memory
    largest: int | None  # largest micro-batch that fits on the device
    traffic: StepTraffic
    speed: Speed
    predictions: list[PredictedTime]  # at the slow and the fast speed of the towers; one if they are equal

    @property
    def micro_batch(self) -> int:
        """Number of samples in a forward pass of one device."""
        return self.spec.data.batch_size // self.ranks // self.spec.data.micro_batches

    @property
    def needed(self) -> float:
        """Bytes of memory that a device needs, with the reserve."""
        return self.memory.total + 1e9 * RESERVE_GB

    @property
    def fits(self) -> bool:
        return self.needed <= 1e9 * self.spec.memory_gb


def plan(spec: PlanSpec, log: Callable[[str], None], largest: bool = True) -> Plan:
    """Plans a run. Raises ConfigError. `largest` also finds the largest micro-batch, which takes two more dry runs."""
    log("dry runs of the model")
    model_memory = MemoryModel(spec)
    limit = 1e9 * (spec.memory_gb - RESERVE_GB)
    ranks = spec.ranks or _min_ranks(spec, model_memory, limit)
    spec.data.check_ranks(ranks)
    b = spec.data.batch_size // ranks // spec.data.micro_batches
    towers = model_memory.towers(b)
    model, memory = model_memory.dry.model, model_memory.memory(ranks, towers)
    counted, whole = model_memory.dry.flops(spec.tokens), model_memory.dry.flops(spec.model.text.context_length)
    flops, flops_of_whole = (_flops(one, b, spec.data.micro_batches) for one in (counted, whole))
    shape, speed = _step_shape(spec, model, ranks), tower_speed(spec)
    objective = parameter_count(model_memory.objective(ranks, spec.data.batch_size))
    return Plan(
        spec=spec,
        ranks=ranks,
        parameters={"image": parameter_count(model.image), "text": parameter_count(model.text), "objective": objective},
        trained=parameter_count(model) - frozen_count(model) + objective,
        forward=whole,
        sample_flops=counted.image + counted.text,
        flops=flops,
        memory=memory,
        largest=model_memory.largest(ranks, limit) if largest else None,
        traffic=_traffic(spec, shape),
        speed=speed,
        predictions=[
            _predict(spec, shape, flops if speed.packed else flops_of_whole, rate)
            for rate in dict.fromkeys(speed.flops)
        ],
    )


def _min_ranks(spec: PlanSpec, model_memory: MemoryModel, limit: float) -> int:
    """Returns the smallest power of two that divides the batch and whose micro-batch fits. Raises ConfigError."""
    batch, micro, ranks = spec.data.batch_size, spec.data.micro_batches, 1
    while batch % (ranks * micro) == 0:
        if model_memory.needed(ranks, batch // ranks // micro) <= limit:
            return ranks
        ranks *= 2
    raise ConfigError(
        f"ranks=null: no power of two of devices with device_memory_gb={spec.memory_gb:g} holds "
        f"data.batch_size={batch} in data.micro_batches={micro}: raise data.micro_batches, or give ranks"
    )


def _flops(counted: Flops, samples: int, micro_batches: int) -> float:
    """Returns the FLOPs of a step: all micro-batches but the last go forward twice."""
    forward = counted.image + counted.text
    return samples * (micro_batches * (forward + counted.backward) + (micro_batches - 1) * forward)


def _step_shape(spec: PlanSpec, model: CLIP, ranks: int) -> StepShape:
    """Returns the shape of a step. Parameters are counted in units of 4 bytes: 16-bit gradients count half."""
    size = next(model.parameters()).itemsize
    if isinstance(spec.distributed, DdpSpec) and spec.distributed.compression is Compression.bf16:
        size = min(size, 2)
    norms = any(isinstance(module, BATCH_NORM) for module in model.modules())
    return StepShape(
        objective_traffic(spec.objective, spec.texts, spec.compares_captions),
        spec.data.batch_size // ranks,
        ranks,
        model.embed_dim,
        parameter_count(model) * size // 4,
        sum(buffer.nbytes for buffer in model.buffers()) if norms else 0,
        frozen_count(model) * size // 4,
    )


def _traffic(spec: PlanSpec, shape: StepShape) -> StepTraffic:
    if shape.ranks == 1:
        return StepTraffic()
    return (fsdp_traffic if spec.distributed.shards_parameters else ddp_traffic)(shape)


def _predict(spec: PlanSpec, shape: StepShape, flops: float, rate: float) -> PredictedTime:
    """Predicts the time of a step with `flops` of the towers on each device, at `rate` FLOP/s. The loss costs 6·b·B·D
    multiplications and as many additions, for each text of a sample."""
    batch = shape.b * shape.ranks
    loss = 12 * shape.b * batch * shape.objective.texts * shape.dim / loss_speed(spec)[0]
    return PredictedTime(shape.ranks, batch, flops / rate, loss, _steps(spec), spec.price_per_gpu_hour)


def _steps(spec: PlanSpec) -> int | None:
    if spec.samples is None and spec.whole.unit == "ep":
        return None
    return spec.whole.samples(Length(spec.samples or 0, spec.data.batch_size)) // spec.data.batch_size
