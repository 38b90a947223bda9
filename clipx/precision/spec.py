"""Options for the number format of the towers. Embeddings, temperature and loss are float32 or wider in all of them.

docs/guides/precision.md describes the requirements, the cost and the rounding of each format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import ConfigError, require, require_effect

if TYPE_CHECKING:
    from torch import nn

Capability = tuple[int, int]
VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)
"""First NVIDIA compute capabilities with matrix products in float16; in bfloat16 and int8; in float8."""


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Settings of torch.amp.GradScaler: the first scale, and the steps without an overflow until it doubles."""

    initial: float
    growth_steps: int


@dataclass(frozen=True, slots=True)
class Precision:
    """Number format of a run on a device.

    `dtype`: of the weights in forward and backward. `autocast_dtype`: of the towers' matrix products under autocast;
    None: no autocast, the products have the dtype of the weights.
    """

    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device_type: str
    description: str = ""  # logged at the start of a run
    master_weights: bool = False  # the optimizer steps float32 copies of the weights
    loss_scale: LossScaling | None = None

    @property
    def wide(self) -> torch.dtype:
        """dtype of the objective's parameters and of master weights: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def stored(self) -> torch.dtype:
        """dtype of the weights that the optimizer steps and checkpoints store."""
        return self.wide if self.master_weights else self.dtype

    def build_scaler(self) -> torch.amp.GradScaler:
        """Returns a scaler of the loss that halves the scale at each overflow; disabled without `loss_scale`."""
        if self.loss_scale is None:
            return torch.amp.GradScaler(self.device_type, enabled=False)
        initial, steps = self.loss_scale.initial, self.loss_scale.growth_steps
        return torch.amp.GradScaler(self.device_type, init_scale=initial, growth_interval=steps)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Returns the autocast context for the towers, or a null context."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)


# --------------------------------------------------------------------------------------------------- the formats


@frozen
class PrecisionSpec:
    """Base of the number formats."""

    kind: str = MISSING
    """Name of the number format. Set by the option: precision=fp32, precision=amp_bf16, …"""

    autocasts: ClassVar[bool] = False
    """True if the towers run under autocast, which accepts weights in another format than the inputs."""

    weight_format: ClassVar[str | None] = None
    """dtype of the weights in forward and backward, a name of torch. None: not declared."""

    product_format: ClassVar[str | None] = None
    """Data sheet column with the peak rate of its matrix products: half, tf32, fp32 or fp64; None: unknown."""

    tunes_shapes: ClassVar[bool] = False
    """True if each new shape of an image tower's tokens waits minutes for a search of kernels."""

    @property
    def converts_layers(self) -> bool:
        """True if the format has its own `convert`."""
        return type(self).convert is not PrecisionSpec.convert

    def resolve(self, bf16: bool) -> PrecisionSpec:
        """Returns the format for a device with or without bfloat16: this one, unless the device chooses it."""
        return self

    def on(self, device: torch.device) -> PrecisionSpec:
        """Returns the format that is used on `device`: this one, unless the device chooses it."""
        return self.resolve(_has_bf16(device))

    def elsewhere(self, device: torch.device) -> PrecisionSpec:
        """Returns the format in which the weights of a run in this format are evaluated on `device`, by default."""
        return self.on(device)

    def build(self, device: torch.device) -> Precision:
        """Returns the number format on `device`. Raises ConfigError if `device` does not support it."""
        raise NotImplementedError

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        """Raises ConfigError for options of other groups that are incompatible with the format."""

    def check_device_type(self, device_type: str) -> None:
        """Raises ConfigError if no device of this type, such as cpu, supports the format."""

    def convert(self, blocks: Mapping[str, nn.Module]) -> list[str]:
        """Replaces linear layers inside the towers' blocks in place, keeping their parameters. Returns their names."""
        return []


@register("precision")
@frozen
class Fp32Spec(PrecisionSpec):
    """float32 weights and matrix products, or TF32 products. Runs on any device."""

    kind: str = "fp32"

    weight_format: ClassVar[str | None] = "float32"

    tf32: bool = False
    """Whether the towers' matrix products are in TF32: faster, with 10 bits of mantissa. Needs an NVIDIA device of
    compute capability 8.0 or higher."""

    @property
    def product_format(self) -> str:  # type: ignore[override]
        return "tf32" if self.tf32 else "fp32"

    def check_device_type(self, device_type: str) -> None:
        require_effect(not self.tf32 or device_type == "cuda", "precision.tf32=true", f"on {device_type}")

    def build(self, device: torch.device) -> Precision:
        self.check_device_type(device.type)
        if self.tf32:
            require_capability(device, AMPERE, "precision.tf32=true", "precision.tf32=false")
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        description = "TF32 products (NVIDIA, compute capability 8.0)" if self.tf32 else "on any device"
        return Precision(torch.float32, None, device.type, f"float32 weights; {description}")


@register("precision")
@frozen
class Fp64Spec(PrecisionSpec):
    """float64 throughout: for checking numerics, not for training. Runs on any device but mps."""

    kind: str = "fp64"

    weight_format: ClassVar[str | None] = "float64"

    product_format: ClassVar[str | None] = "fp64"

    def check_device_type(self, device_type: str) -> None:
        require(device_type != "mps", "precision=fp64 needs float64, which mps does not have: use fp32")

    def build(self, device: torch.device) -> Precision:
        self.check_device_type(device.type)
        return Precision(torch.float64, None, device.type, "float64 weights; on any device but mps")


@register("precision")
@frozen
class AmpBf16Spec(PrecisionSpec):
    """float32 weights, bfloat16 products. Needs no loss scaling: bfloat16 has the range of float32.

    Needs a device with bfloat16 (NVIDIA: compute capability 8.0 or higher).
    """

    kind: str = "amp_bf16"

    autocasts: ClassVar[bool] = True
    weight_format: ClassVar[str | None] = "float32"

    product_format: ClassVar[str | None] = "half"

    def elsewhere(self, device: torch.device) -> PrecisionSpec:
        return AutoSpec().on(device)  # a GPU's run may be evaluated on a CPU, where bfloat16 is slow

    def build(self, device: torch.device) -> Precision:
        _require_bf16(device, "amp_bf16", "amp_fp16 or fp32")
        description = "float32 weights, bfloat16 products; needs bfloat16 (NVIDIA: compute capability 8.0)"
        return Precision(torch.float32, torch.bfloat16, device.type, description)


@frozen
class _ScaledSpec(PrecisionSpec):
    """Base of the number formats with float16 gradients."""

    loss_scale: float = option(65536.0, ge=1, hint="65536 is usual")
    """Initial factor of the loss. A step whose gradients overflow is skipped and halves the factor.
    precision=fp16 has it with precision.master_weights=true only."""

    loss_scale_growth: int = option(2000, ge=1, hint="2000 is usual")
    """Number of steps without an overflow after which the factor of the loss doubles. precision=fp16 has it with
    precision.master_weights=true only."""

    product_format: ClassVar[str | None] = "half"


@register("precision")
@frozen
class AmpFp16Spec(_ScaledSpec):
    """float32 weights, float16 products and loss scaling, for devices without bfloat16.

    Needs a device with float16 (NVIDIA: compute capability 7.0 or higher).
    """

    kind: str = "amp_fp16"

    autocasts: ClassVar[bool] = True
    weight_format: ClassVar[str | None] = "float32"

    def build(self, device: torch.device) -> Precision:
        require_capability(device, VOLTA, "precision=amp_fp16", "fp32")
        description = (
            f"float32 weights, float16 products, initial loss scale {self.loss_scale:,.0f}; needs float16 "
            "(NVIDIA: compute capability 7.0)"
        )
        scale = LossScaling(self.loss_scale, self.loss_scale_growth)
        return Precision(torch.float32, torch.float16, device.type, description, loss_scale=scale)


@register("precision")
@frozen
class Bf16Spec(PrecisionSpec):
    """bfloat16 weights: half the memory of weights and gradients.

    Without master weights an update of less than 1/256 of a weight is lost. Needs a device with bfloat16 (NVIDIA:
    compute capability 8.0 or higher).
    """

    kind: str = "bf16"

    weight_format: ClassVar[str | None] = "bfloat16"

    master_weights: bool = True
    """Whether the optimizer steps float32 copies of the weights, which checkpoints then store. false: an update of less
    than 1/256 of a weight is lost, and optimizer.ema_decay is an error. true is an error with distributed=fsdp, which
    stores float32 weights itself: use precision=amp_bf16 there, which gathers them in bfloat16."""

    product_format: ClassVar[str | None] = "half"

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        check_16_bit(self.kind, self.master_weights, ema_decay, shards_parameters)

    def build(self, device: torch.device) -> Precision:
        _require_bf16(device, "bf16", "amp_fp16 or fp32")
        description = (
            f"bfloat16 weights{describe_masters(self.master_weights)}; needs bfloat16 (NVIDIA: compute capability 8.0)"
        )
        return Precision(torch.bfloat16, None, device.type, description, self.master_weights)


@register("precision")
@frozen
class Fp16Spec(_ScaledSpec):
    """float16 weights; with master weights also loss scaling.

    Without master weights there is no loss scaling, because torch does not unscale float16 gradients: values below
    6e-8 become 0, including Adam's second moments. Needs a device with float16 (NVIDIA: compute capability 7.0 or
    higher).
    """

    kind: str = "fp16"

    weight_format: ClassVar[str | None] = "float16"

    master_weights: bool = True
    """Whether the optimizer steps float32 copies of the weights, which checkpoints then store. false: no loss scaling,
    gradients and moments below 6e-8 become 0, an update of less than 1/2048 of a weight is lost, and
    optimizer.ema_decay is an error. true is an error with distributed=fsdp, which stores float32 weights itself: use
    precision=amp_bf16 there, which gathers them in bfloat16."""

    def __post_init__(self) -> None:
        usual = (self.loss_scale, self.loss_scale_growth) == (65536.0, 2000)
        given = f"precision.loss_scale={self.loss_scale:g} with loss_scale_growth={self.loss_scale_growth}"
        require_effect(self.master_weights or usual, given, "with precision.master_weights=false")

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        check_16_bit(self.kind, self.master_weights, ema_decay, shards_parameters)

    def build(self, device: torch.device) -> Precision:
        require_capability(device, VOLTA, "precision=fp16", "fp32")
        scale = LossScaling(self.loss_scale, self.loss_scale_growth) if self.master_weights else None
        masters = describe_masters(self.master_weights) or ", gradients and moments, of which those below 6e-8 become 0"
        description = f"float16 weights{masters}; needs float16 (NVIDIA: compute capability 7.0)"
        return Precision(torch.float16, None, device.type, description, self.master_weights, scale)


@register("precision")
@frozen
class AutoSpec(PrecisionSpec):
    """amp_bf16 on an accelerator with bfloat16 (NVIDIA: compute capability 8.0 or higher), fp32 on other devices.

    Both have float32 weights, so a checkpoint of one resumes with the other. On the CPU: fp32.
    """

    kind: str = "auto"

    autocasts: ClassVar[bool] = True  # or the format that it chose is refused

    def resolve(self, bf16: bool) -> PrecisionSpec:
        return AmpBf16Spec() if bf16 else Fp32Spec()

    def build(self, device: torch.device) -> Precision:
        return self.on(device).build(device)


def check_16_bit(kind: str, masters: bool, ema_decay: float | None, shards_parameters: bool) -> None:
    require(
        masters or ema_decay is None,
        f"optimizer.ema_decay={ema_decay} is lost in the rounding of precision={kind} without master weights: set "
        "precision.master_weights=true, or remove it",
    )
    require(
        not (masters and shards_parameters),
        f"precision={kind} with master weights is incompatible with distributed=fsdp, which stores float32 weights "
        "itself: use precision=amp_bf16, or distributed=ddp",
    )


def _has_bf16(device: torch.device) -> bool:
    """Returns whether `device` is an accelerator that computes matrix products in bfloat16, without emulation."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    supported = None if device.type == "cpu" else getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return supported is not None and bool(supported())


def _require_bf16(device: torch.device, kind: str, instead: str) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision={kind} needs a device with bfloat16 (compute capability 8.0): use {instead}",
        )


def require_capability(device: torch.device, least: Capability, option: str, instead: str) -> None:
    """Raises ConfigError for NVIDIA devices below a compute capability. On other devices torch decides."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    found = torch.cuda.get_device_capability(device)
    require(
        found >= least,
        f"{option} needs compute capability {dotted(least)}, and {torch.cuda.get_device_name(device)} has "
        f"{dotted(found)}: use {instead}",
    )


def dotted(capability: Capability) -> str:
    """Returns a compute capability as NVIDIA writes it: 8.0."""
    return ".".join(map(str, capability))


def describe_masters(on: bool) -> str:
    return " with float32 master weights" if on else ""


def describe(precision: Precision, converted: list[str]) -> str:
    """Returns the number format and the converted layers by kind, for the log at the start of a run."""
    if not converted:
        return precision.description
    kinds: dict[str, int] = {}
    for name in converted:
        tower = f"{name.partition('.')[0]}.*.{name.rpartition('.')[2]}"
        kinds[tower] = kinds.get(tower, 0) + 1
    layers = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{precision.description}; {len(converted)} linear layers of blocks converted: {layers}"
