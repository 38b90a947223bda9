"""Options of `python -m clipx.plan`, which predicts the parameters, FLOPs, memory, traffic, time and cost of a run from
its configuration (docs/guides/plan.md)."""

from __future__ import annotations

from clipx.config.registry import complete, frozen, register
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec
from clipx.errors import ClipxError, require
from clipx.extra.plan.traffic import objective_traffic
from clipx.model.flops import DEVICES, Device, peak_tflops
from clipx.trainer.spec import RunSpec

_FROM_DATA_SHEET = ("device_peak_tflops", "device_memory_gb", "mfu", "loss_tflops")


@register("")
@frozen
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
    """Number of devices. At least 1. null: the smallest of 1, 2, 4, … whose memory is sufficient."""

    samples: int | None = None
    """Number of samples in the data set, at least `data.batch_size`. null: the number of the data, if it is published,
    set, or counted in a table or folder. Required by objectives with state for each sample if there is none."""

    gpu: str = "H100"
    """Device whose data sheet is used: B200, H200, "H100 PCIe", H100, A100, L40S or A10. Another name needs
    device_peak_tflops and all keys below whose null refers to the data sheet."""

    device_memory_gb: float | None = None
    """Memory of a device in GB of 1e9 bytes. Above 0. null: that of the data sheet, 80 for an A100."""

    reserve_gb: float = 4.0
    """Part of the memory for the CUDA context, NCCL, workspaces of cuDNN and cuBLAS, and fragmentation, in GB of 1e9
    bytes. In [0, device_memory_gb)."""

    mfu: float | None = None
    """Share of the peak that the towers reach in the FLOPs that they compute, in (0, 1]; train/mfu of a run without
    recomputation and micro-batches. null: the range of published runs with this model on this device, or with others
    if there is none. 0.4 is what large models reach at best."""

    measured: str | None = None
    """results.json of `clipx.bench step` or `clipx.bench gpu` on this device, whose fastest step with this model and
    precision gives the speed of the towers. Cannot be combined with `mfu`. null: `mfu`, or published runs."""

    loss_tflops: float | None = None
    """TFLOP/s that the loss reaches in float32. Above 0. null: 45 % of the device's peak in float32."""

    text_tokens: float | None = None
    """Mean number of tokens of a caption, start and end tokens included. In [2, model.text.context_length]; needs
    model.text.packed=true. null: 20, at most the context length; the context length if texts are not packed."""

    bytes_per_sample: float = 25e3
    """Bytes of a sample in storage. Above 0. The default is that of LAION-400M, 10 TB at 256 pixels."""

    price_per_gpu_hour: float | None = None
    """Price of a GPU-hour in any currency. Above 0. null: no cost is printed."""

    def __post_init__(self) -> None:
        RunSpec.__post_init__(self)
        complete(self, precision=self.precision.resolve(bf16=True))  # all GPUs of the data sheets have bfloat16
        require(
            self.model.outputs is None,
            f"model={self.model.name} returns {self.model.outputs}, whose computation a plan does not count: plan a "
            "CLIP model with the same towers, such as model=vit_b32",
        )
        self._check_device()
        require(
            self.ranks is None or self.ranks >= 1, f"ranks={self.ranks} must be at least 1, or null to find the number"
        )
        require(
            not self.stages,
            f"stages={self.stages}: a plan covers one stage: plan each with its values and with stages=[]",
        )
        self.data.check_ranks(self.ranks or 1)
        self._check_samples()
        require(
            not self.objective.taught,
            f"objective={self.objective.kind} needs a teacher, whose time and memory a plan does not count: plan with "
            f"objective={self.objective.untaught or 'infonce'} and add its forward (docs/guides/distillation.md)",
        )
        objective_traffic(self.objective)
        require(
            isinstance(self.distributed, DdpSpec | FsdpSpec),
            f"distributed={self.distributed.kind} has no model of traffic and memory here: plan with ddp or fsdp",
        )
        self._check_positive()
        require(
            self.mfu is None or 0 < self.mfu <= 1,
            f"mfu={self.mfu} must be in (0, 1]: 0.4 is usual for large models, null uses published runs",
        )
        require(
            self.measured is None or self.mfu is None,
            f"mfu={self.mfu} and measured={self.measured} both give the speed of the towers: remove one",
        )
        require(
            self.measured is None or not self.published,
            f"measured={self.measured} is of one model and published=true plans several: remove one",
        )
        length = self.model.text.context_length
        require(
            self.text_tokens is None or (self.model.text.packed and 2 <= self.text_tokens <= length),
            f"text_tokens={self.text_tokens} must be in [2, {length}], the context length, and has no effect with "
            "model.text.packed=false: correct or remove it",
        )

    def _check_device(self) -> None:
        if self.gpu in DEVICES:
            return
        missing = [key for key in _FROM_DATA_SHEET if getattr(self, key) is None]
        require(
            not missing,
            f"gpu={self.gpu} is not known: choose from {', '.join(DEVICES)}, or also give {', '.join(missing)}",
        )

    def _check_samples(self) -> None:
        """Counts the samples of the data if the number is not given. Raises ConfigError or DataError."""
        batch = self.data.batch_size
        require(
            self.samples is None or self.samples >= batch,
            f"samples={self.samples} must be at least data.batch_size={batch}: give the data set's size",
        )
        if self.samples is None:
            try:
                complete(self, samples=self.data.count())
            except ClipxError as error:
                raise type(error)(f"{error}; or give samples=N") from error
        require(
            self.samples is None or self.samples >= batch,
            f"data.batch_size={batch} is larger than the data set of {self.samples} samples: use at most "
            f"{self.samples}, or give samples=N of the whole data set",
        )
        require(
            self.samples is not None or not self.objective.indexed,
            f"objective={self.objective.kind} stores state for each sample, and the number of samples of "
            f"data={self.data.name} is unknown: give samples=N",
        )

    def _check_positive(self) -> None:
        for key in ("device_memory_gb", "loss_tflops", "bytes_per_sample", "price_per_gpu_hour"):
            value = getattr(self, key)
            require(value is None or value > 0, f"{key}={value} must be above 0")
        require(
            0 <= self.reserve_gb < self.memory_gb,
            f"reserve_gb={self.reserve_gb} must be in [0, device_memory_gb={self.memory_gb}): 4 is usual",
        )

    @property
    def device(self) -> Device:
        """Data sheet of the device. Raises ConfigError if it is unknown."""
        require(self.gpu in DEVICES, f"gpu={self.gpu} is not known: choose from {', '.join(DEVICES)}")
        return DEVICES[self.gpu]

    @property
    def memory_gb(self) -> float:
        """Memory of a device in GB."""
        return self.device.memory if self.device_memory_gb is None else self.device_memory_gb

    @property
    def texts(self) -> int:
        """Number of texts of a sample."""
        return self.data.captions_per_step

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
