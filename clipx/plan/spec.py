"""Options of `python -m clipx.plan`, which predicts the parameters, FLOPs, memory, traffic, time and cost of a run from
its configuration (docs/plan.md)."""

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
    """A run, and the machine for which it is planned. `device_peak_tflops` is an option of the run: null uses the peak
    of `gpu`."""

    kind: str = "plan"
    """Name of this command in the registry. Do not change it."""

    json: bool = False
    """Prints one line of JSON on stdout instead of tables."""

    published: bool = False
    """Plans the published settings of other work on this machine and prints one table, instead of planning this run."""

    ranks: int | None = None
    """Number of devices. At least 1; a multiple of `gpus_per_node`, or fewer. null: the smallest of 1, 2, 4, … whose
    memory is sufficient."""

    samples: int | None = None
    """Number of samples in the data set, at least `data.batch_size`. null: the published number of the data set, if it
    has one. Required by objectives with state for each sample if there is no published number."""

    gpu: str = "H100"
    """Device whose peak FLOP/s of the data sheet are used: B200, H200, "H100 PCIe", H100, A100, L40S or A10."""

    device_memory_gb: float = 80.0
    """Memory of a device in GB of 1e9 bytes. Above 0."""

    reserve_gb: float = 4.0
    """Part of `device_memory_gb` for the CUDA context, NCCL, workspaces of cuDNN and cuBLAS, and fragmentation, in GB
    of 1e9 bytes. In [0, device_memory_gb)."""

    mfu: float = 0.4
    """Model FLOPs utilisation of the towers, a share of the peak in (0, 1]. 0.4 is what large models reach at best;
    published LAION-400M runs reached about 0.12."""

    loss_tflops: float = 30.0
    """TFLOP/s that the loss reaches in float32. Above 0."""

    gpus_per_node: int = 8
    """Number of GPUs in each node. At least 1."""

    within_us: float = 3.0
    """Latency from GPU to GPU within a node, in microseconds. Above 0."""

    within_gbs: float = 300.0
    """Bandwidth of a GPU within a node, in GB/s in one direction. Above 0."""

    between_us: float = 10.0
    """Latency between nodes, in microseconds. Above 0."""

    between_gbs: float = 40.0
    """Bandwidth of a GPU's network adapter between nodes, in GB/s in one direction. Above 0."""

    text_tokens: float | None = None
    """Mean number of tokens of a caption, start and end tokens included. In [2, model.text.context_length]; needs
    model.text.packed=true. null: 20, at most the context length; the context length if texts are not packed."""

    bytes_per_sample: float = 25e3
    """Bytes of a sample in storage. Above 0. The default is that of LAION-400M, 10 TB at 256 pixels."""

    price_per_gpu_hour: float | None = None
    """Price of a GPU-hour in any currency. Above 0. null: no cost is printed."""

    def __post_init__(self) -> None:
        RunSpec.__post_init__(self)
        require(
            not self.model.captions,
            f"model={self.model.name} has a decoder, which a plan does not count: plan a CLIP model with the same "
            "towers, such as model=vit_b32",
        )
        require(self.gpu in DEVICES, f"gpu={self.gpu} is not known: choose from {', '.join(DEVICES)}")
        require(
            self.ranks is None or self.ranks >= 1, f"ranks={self.ranks} must be at least 1, or null to find the number"
        )
        known = self.data.published
        require(
            self.samples is None or self.samples >= self.data.batch_size,
            f"samples={self.samples} must be at least data.batch_size={self.data.batch_size}: give the data set's size",
        )
        require(
            self.samples is not None or known is not None or not self.objective.indexed,
            f"objective={self.objective.kind} stores state for each sample, and data={self.data.name} has no published "
            "number of samples: give samples=N",
        )
        require(
            not self.objective.taught,
            f"objective={self.objective.kind} needs a teacher, whose time and memory a plan does not count: plan with "
            "objective=infonce and add the teacher's forward (docs/distillation.md)",
        )
        objective_traffic(self.objective)
        require(
            isinstance(self.distributed, DdpSpec | FsdpSpec),
            f"distributed={self.distributed.kind} has no model of traffic and memory here: plan with ddp or fsdp",
        )
        self._check_positive()
        require(0 < self.mfu <= 1, f"mfu={self.mfu} must be in (0, 1]: 0.4 is usual for large models")
        length = self.model.text.context_length
        require(
            self.text_tokens is None or (self.model.text.packed and 2 <= self.text_tokens <= length),
            f"text_tokens={self.text_tokens} must be in [2, {length}], the context length, and has no effect with "
            "model.text.packed=false: correct or remove it",
        )

    def _check_positive(self) -> None:
        for key in ("device_memory_gb", "loss_tflops", "gpus_per_node", "within_us", "within_gbs", "between_us",
                    "between_gbs", "bytes_per_sample"):  # fmt: skip
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)} must be above 0")
        require(
            0 <= self.reserve_gb < self.device_memory_gb,
            f"reserve_gb={self.reserve_gb} must be in [0, device_memory_gb={self.device_memory_gb}): 4 is usual",
        )
        price = self.price_per_gpu_hour
        require(price is None or price > 0, f"price_per_gpu_hour={price} must be above 0, or null for no cost")

    @property
    def data_samples(self) -> int | None:
        """Number of samples in the data set. None if unknown."""
        return self.data.published if self.samples is None else self.samples

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a text that are computed."""
        length = float(self.model.text.context_length)
        if not self.model.text.packed:
            return length
        return min(20.0, length) if self.text_tokens is None else self.text_tokens

    @property
    def peak_tflops(self) -> float:
        """Peak TFLOP/s of one device. Raises ConfigError if unknown."""
        peak = self.device_peak_tflops or peak_tflops(self.gpu, self.precision)
        require(
            peak is not None,
            f"the peak of gpu={self.gpu} with precision={self.precision.kind} is unknown: give device_peak_tflops",
        )
        assert peak is not None
        return peak
