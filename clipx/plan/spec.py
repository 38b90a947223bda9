"""What a run needs before it is started: parameters, FLOPs, memory, traffic, time and money, from its configuration
alone. `python -m clipx.plan`, docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass

from clipx.config.registry import option
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec
from clipx.errors import require
from clipx.model.flops import DEVICES, peak_tflops
from clipx.plan.traffic import objective_traffic
from clipx.trainer.spec import RunSpec


@option("")
@dataclass(kw_only=True, slots=True)
class PlanSpec(RunSpec):
    """A run, and the machine that it is planned for. `device_peak_tflops` is the run's own key: null takes gpu's."""

    kind: str = "plan"
    json: bool = False  # one line of JSON in the tables' place
    published: bool = False  # the published settings in one table, in place of this run

    ranks: int | None = None  # devices; null: as few, 1, 2, 4, …, as have the memory
    samples: int | None = None  # in the data set, where data does not say
    gpu: str = "H100"  # whose peak is taken
    device_memory_gb: float = 80.0  # of 1e9 bytes
    reserve_gb: float = 4.0  # of it for the CUDA context, NCCL, workspaces and fragmentation
    mfu: float = 0.4  # share of the peak that the towers reach
    loss_tflops: float = 30.0  # that the loss reaches in float32
    gpus_per_node: int = 8
    within_us: float = 3.0  # latency from GPU to GPU in a node
    within_gbs: float = 300.0  # GB/s of a GPU in one direction in a node
    between_us: float = 10.0  # latency between nodes
    between_gbs: float = 40.0  # GB/s of a GPU's adapter in one direction
    text_tokens: float | None = None  # of a caption on average, start and end included; null: 20, or all if not packed
    bytes_per_sample: float = 25e3  # in storage: LAION-400M's 10 TB at 256 pixels
    price_per_gpu_hour: float | None = None  # in any currency

    def __post_init__(self) -> None:
        RunSpec.__post_init__(self)
        require(
            not self.model.captions,
            f"model={self.model.name} has a decoder, which a plan does not count: plan its towers as a CLIP's, e.g. "
            "model=vit_b32",
        )
        require(self.gpu in DEVICES, f"gpu={self.gpu} is not known: choose from {', '.join(DEVICES)}")
        require(self.ranks is None or self.ranks >= 1, f"ranks={self.ranks} must be at least 1: null finds the number")
        known = self.data.published
        require(
            self.samples is None or self.samples >= self.data.batch_size,
            f"samples={self.samples} is less than data.batch_size={self.data.batch_size}: give the data set's size",
        )
        require(
            self.samples is not None or known is not None or not self.objective.indexed,
            f"objective={self.objective.kind} keeps state for each sample, and data={self.data.name} does not say how "
            "many there are: give samples=N",
        )
        require(
            not self.objective.taught,
            f"objective={self.objective.kind}: a plan knows nothing of a teacher's time and memory: plan with "
            "objective=infonce, and add the teacher's forward (docs/distillation.md)",
        )
        objective_traffic(self.objective)
        require(
            isinstance(self.distributed, DdpSpec | FsdpSpec),
            f"distributed={self.distributed.kind}: a plan knows the traffic and memory of ddp and fsdp only: plan "
            "with one of them",
        )
        self._check_positive()
        require(0 < self.mfu <= 1, f"mfu={self.mfu} must lie in (0, 1]: 0.4 is usual for large models")
        length = self.model.text.context_length
        require(
            self.text_tokens is None or (self.model.text.packed and 2 <= self.text_tokens <= length),
            f"text_tokens={self.text_tokens} must lie in [2, {length}], the context, and has no effect with "
            "model.text.packed=false: leave it out there",
        )

    def _check_positive(self) -> None:
        for key in ("device_memory_gb", "loss_tflops", "gpus_per_node", "within_us", "within_gbs", "between_us",
                    "between_gbs", "bytes_per_sample"):  # fmt: skip
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)} must be above 0")
        require(
            0 <= self.reserve_gb < self.device_memory_gb,
            f"reserve_gb={self.reserve_gb} must lie in [0, device_memory_gb={self.device_memory_gb}): 4 is usual",
        )
        price = self.price_per_gpu_hour
        require(price is None or price > 0, f"price_per_gpu_hour={price} must be above 0; null leaves costs out")

    @property
    def data_samples(self) -> int | None:
        """In the data set; None where nobody says."""
        return self.data.published if self.samples is None else self.samples

    @property
    def tokens(self) -> float:
        """Of a text, that are computed on average."""
        length = float(self.model.text.context_length)
        if not self.model.text.packed:
            return length
        return min(20.0, length) if self.text_tokens is None else self.text_tokens

    @property
    def peak_tflops(self) -> float:
        """Of one device. Raises ConfigError where it is not known."""
        peak = self.device_peak_tflops or peak_tflops(self.gpu, self.precision)
        require(
            peak is not None,
            f"the peak of gpu={self.gpu} with precision={self.precision.kind} is not known: give device_peak_tflops",
        )
        assert peak is not None
        return peak
