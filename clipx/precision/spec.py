"""In which number format the towers compute. Embeddings, temperature and loss are float32 or wider in all of them.

docs/precision.md has what each format needs, costs and rounds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config.lazy_torch import torch
from clipx.config.registry import MISSING, option
from clipx.errors import ConfigError, require
from clipx.precision.loss_scaler import LossScaling

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

Capability = tuple[int, int]
VOLTA, AMPERE, ADA = (7, 0), (8, 0), (8, 9)
"""NVIDIA's compute capabilities with matrix products in float16; in bfloat16 and int8; in float8."""


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype`: of the weights that compute. `autocast_dtype`: of the towers' products, None for the weights' own."""

    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device_type: str
    description: str = ""  # logged at the start of a run
    master_weights: bool = False  # the optimizer steps float32 copies of the weights
    loss_scale: LossScaling | None = None

    @property
    def wide(self) -> torch.dtype:
        """Of the objective's parameters, and of master weights."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def stored(self) -> torch.dtype:
        """Of the weights that the optimizer steps and a checkpoint holds."""
        return self.wide if self.master_weights else self.dtype

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)


# --------------------------------------------------------------------------------------------------- the formats


@dataclass(kw_only=True, slots=True)
class PrecisionSpec:
    kind: str = MISSING

    @property
    def product_format(self) -> str | None:
        """Column of a device's data sheet that its matrix products are in: half, tf32, fp32 or fp64; None: unknown."""
        return None

    def build(self, device: torch.device) -> Precision:
        """Raises ConfigError where `device` lacks what the format needs."""
        raise NotImplementedError

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        """Raises ConfigError for other groups' options that do not go with the format."""

    def convert(self, blocks: Mapping[str, nn.Module]) -> list[str]:
        """Replaces linear layers inside the towers' blocks in place, their parameters as they are. Their names."""
        return []


@option("precision")
@dataclass(kw_only=True, slots=True)
class Fp32Spec(PrecisionSpec):
    kind: str = "fp32"
    tf32: bool = False  # matrix products of the towers in TF32 on NVIDIA devices: faster, 10 bits of mantissa

    @property
    def product_format(self) -> str:
        return "tf32" if self.tf32 else "fp32"

    def build(self, device: torch.device) -> Precision:
        if self.tf32 and device.type != "cuda":
            raise ConfigError(f"precision.tf32=true has no effect on {device.type}: set it to false, or train on cuda")
        if self.tf32:
            _require_capability(device, AMPERE, "precision.tf32=true", "precision.tf32=false")
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        description = "TF32 products (NVIDIA, compute capability 8.0)" if self.tf32 else "on any device"
        return Precision(torch.float32, None, device.type, f"float32 weights; {description}")


@option("precision")
@dataclass(kw_only=True, slots=True)
class Fp64Spec(PrecisionSpec):
    """Everything in float64: for checking numerics, not for training at any size."""

    kind: str = "fp64"

    @property
    def product_format(self) -> str:
        return "fp64"

    def build(self, device: torch.device) -> Precision:
        require(device.type != "mps", "precision=fp64 needs a device with float64, which mps has not: use fp32")
        return Precision(torch.float64, None, device.type, "float64 weights; on any device but mps")


@option("precision")
@dataclass(kw_only=True, slots=True)
class AmpBf16Spec(PrecisionSpec):
    """float32 weights, bfloat16 products. Needs no loss scaling: bfloat16 has float32's range."""

    kind: str = "amp_bf16"

    @property
    def product_format(self) -> str:
        return "half"

    def build(self, device: torch.device) -> Precision:
        _require_bf16(device, "amp_bf16", "amp_fp16 or fp32")
        description = "float32 weights, bfloat16 products; needs bfloat16 (NVIDIA: compute capability 8.0)"
        return Precision(torch.float32, torch.bfloat16, device.type, description)


@dataclass(kw_only=True, slots=True)
class _ScaledSpec(PrecisionSpec):
    """A format with float16 gradients."""

    loss_scale: float = 65536.0  # the first factor of the loss: halved by each overflow, and the batch tried again
    loss_scale_growth: int = 2000  # doubled after so many steps without an overflow

    @property
    def product_format(self) -> str:
        return "half"

    def __post_init__(self) -> None:
        LossScaling(self.loss_scale, self.loss_scale_growth)


@option("precision")
@dataclass(kw_only=True, slots=True)
class AmpFp16Spec(_ScaledSpec):
    """float32 weights, float16 products, a scaled loss: for devices without bfloat16."""

    kind: str = "amp_fp16"

    def build(self, device: torch.device) -> Precision:
        _require_capability(device, VOLTA, "precision=amp_fp16", "fp32")
        description = (
            f"float32 weights, float16 products, the loss scaled by {self.loss_scale:,.0f} at first; needs float16 "
            "(NVIDIA: compute capability 7.0)"
        )
        scale = LossScaling(self.loss_scale, self.loss_scale_growth)
        return Precision(torch.float32, torch.float16, device.type, description, loss_scale=scale)


@option("precision")
@dataclass(kw_only=True, slots=True)
class Bf16Spec(PrecisionSpec):
    """bfloat16 weights: half the memory of weights and gradients.

    Without master weights an update of less than 1/256 of a weight is lost.
    """

    kind: str = "bf16"
    master_weights: bool = True  # the optimizer steps float32 copies of the weights, which checkpoints hold

    @property
    def product_format(self) -> str:
        return "half"

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        _check_16_bit(self.kind, self.master_weights, ema_decay, shards_parameters)

    def build(self, device: torch.device) -> Precision:
        _require_bf16(device, "bf16", "amp_fp16 or fp32")
        description = (
            f"bfloat16 weights{_masters(self.master_weights)}; needs bfloat16 (NVIDIA: compute capability 8.0)"
        )
        return Precision(torch.bfloat16, None, device.type, description, self.master_weights)


@option("precision")
@dataclass(kw_only=True, slots=True)
class Fp16Spec(_ScaledSpec):
    """float16 weights; with master weights the loss is scaled too.

    Without them it is not, as torch has no scaling of float16 gradients: what is under 6e-8 vanishes, Adam's second
    moments among it.
    """

    kind: str = "fp16"
    master_weights: bool = True  # the optimizer steps float32 copies of the weights, which checkpoints hold

    def __post_init__(self) -> None:
        _ScaledSpec.__post_init__(self)
        require(
            self.master_weights or (self.loss_scale, self.loss_scale_growth) == (65536.0, 2000),
            "precision.loss_scale and loss_scale_growth have no effect with precision.master_weights=false: leave them "
            "out",
        )

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        _check_16_bit(self.kind, self.master_weights, ema_decay, shards_parameters)

    def build(self, device: torch.device) -> Precision:
        _require_capability(device, VOLTA, "precision=fp16", "fp32")
        scale = LossScaling(self.loss_scale, self.loss_scale_growth) if self.master_weights else None
        if scale is None:
            log.warning(
                "precision=fp16 with precision.master_weights=false: gradients and moments under 6e-8 vanish, and "
                "training may diverge; precision.master_weights=true or precision=bf16 avoids it"
            )
        description = f"float16 weights{_masters(self.master_weights)}; needs float16 (NVIDIA: compute capability 7.0)"
        return Precision(torch.float16, None, device.type, description, self.master_weights, scale)


@dataclass(kw_only=True, slots=True)
class _QuantizedSpec(PrecisionSpec):
    """A format of the linear layers inside the towers' blocks, by torchao. Everything else is in bfloat16."""

    emulate: bool = False  # on any device, slowly: for checking numerics

    @property
    def product_format(self) -> str:
        return "half"  # the linear layers of blocks alone compute in fewer bits

    def _check_device(self, device: torch.device, least: Capability) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"precision={self.kind} needs torchao, which is not installed: pip install 'clipx[quantized]', or use "
                "precision=amp_bf16"
            )
        if self.emulate:
            return
        require(
            device.type == "cuda",
            f"precision={self.kind} needs an NVIDIA device of compute capability {_version(least)}, not {device.type}: "
            "use amp_bf16, or precision.emulate=true to check numerics",
        )
        _require_capability(device, least, f"precision={self.kind}", "amp_bf16")


@option("precision")
@dataclass(kw_only=True, slots=True)
class Float8Spec(_QuantizedSpec):
    """float32 weights, bfloat16 products, and float8 ones in the linear layers of blocks (arXiv:2209.05433).

    Inputs and weights are rounded to e4m3, gradients to e5m2, each tensor with a scale of its own, drawn anew.
    """

    kind: str = "float8"

    def build(self, device: torch.device) -> Precision:
        self._check_device(device, ADA)
        description = f"float32 weights, bfloat16 products, float8 linear layers; {_needs(self.emulate, ADA)}"
        return Precision(torch.float32, torch.bfloat16, device.type, description)

    def convert(self, blocks: Mapping[str, nn.Module]) -> list[str]:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Tokens are as many as a batch has: products over them are padded to the 16 that the hardware takes.
        config = Float8LinearConfig(pad_inner_dim=True, emulate=self.emulate)
        names = _linears(blocks)
        for name, block in blocks.items():
            convert_to_float8_training(
                block, config=config, module_filter_fn=lambda _, layer, name=name: f"{name}.{layer}" in names
            )
        return names


@option("precision")
@dataclass(kw_only=True, slots=True)
class Int8Spec(_QuantizedSpec):
    """bfloat16 weights with float32 master weights, and int8 products in the linear layers of blocks.

    Each row of the one factor and each column of the other has a scale of its own, drawn anew; forward and backward
    (torchao's int8 mixed-precision training).
    """

    kind: str = "int8"

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        _check_16_bit(self.kind, True, ema_decay, shards_parameters)

    def build(self, device: torch.device) -> Precision:
        self._check_device(device, AMPERE)
        description = f"bfloat16 weights{_masters(True)}, int8 linear layers; {_needs(self.emulate, AMPERE)}"
        return Precision(torch.bfloat16, None, device.type, description, master_weights=True)

    def convert(self, blocks: Mapping[str, nn.Module]) -> list[str]:
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_

        config, names = int8_mixed_precision_training(module_swap=True), _linears(blocks)
        for name, block in blocks.items():
            quantize_(block, config, filter_fn=lambda _, layer, name=name: f"{name}.{layer}" in names)
        return names


def _linears(blocks: Mapping[str, nn.Module]) -> list[str]:
    """Linear layers whose sides the hardware takes: multiples of 16. Raises ConfigError where there is none."""
    names = [
        f"{name}.{layer}"
        for name, block in blocks.items()
        for layer, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and module.in_features % 16 == module.out_features % 16 == 0
    ]
    require(
        bool(names),
        "precision=float8 and int8 have no effect on this model, whose blocks have no linear layer with sides that are "
        "multiples of 16: use amp_bf16",
    )
    return names


def _check_16_bit(kind: str, masters: bool, ema_decay: float | None, shards_parameters: bool) -> None:
    require(
        masters or ema_decay is None,
        f"optimizer.ema_decay={ema_decay} is lost in the rounding of precision={kind} without master weights: set "
        "precision.master_weights=true, or leave it out",
    )
    require(
        not (masters and shards_parameters),
        f"precision={kind} with master weights does not go with distributed=fsdp, which keeps float32 weights itself: "
        "use precision=fp32 with distributed.param_dtype=bfloat16, or distributed=ddp",
    )


def _require_bf16(device: torch.device, kind: str, instead: str) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision={kind} needs a device with bfloat16 (compute capability 8.0): use {instead}",
        )


def _require_capability(device: torch.device, least: Capability, option: str, instead: str) -> None:
    """Of NVIDIA devices; of others the formats' products are left to torch."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    found = torch.cuda.get_device_capability(device)
    require(
        found >= least,
        f"{option} needs compute capability {_version(least)}, and {torch.cuda.get_device_name(device)} has "
        f"{_version(found)}: use {instead}",
    )


def _version(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _masters(on: bool) -> str:
    return " with float32 master weights" if on else ""


def _needs(emulate: bool, least: Capability) -> str:
    return "emulated, on any device" if emulate else f"needs NVIDIA of compute capability {_version(least)}"


def describe(precision: Precision, converted: list[str]) -> str:
    """The format and what of the model is converted, for the start of a run."""
    if not converted:
        return precision.description
    kinds: dict[str, int] = {}
    for name in converted:
        tower = f"{name.partition('.')[0]}.*.{name.rpartition('.')[2]}"
        kinds[tower] = kinds.get(tower, 0) + 1
    layers = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{precision.description}; {len(converted)} linear layers of blocks converted: {layers}"
