"""Number formats that quantize linear layers by torchao."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import ConfigError, require, require_effect
from clipx.precision.spec import (
    ADA,
    AMPERE,
    Capability,
    Precision,
    PrecisionSpec,
    check_16_bit,
    describe_masters,
    dotted,
    require_capability,
)

if TYPE_CHECKING:
    from torch import nn


@frozen
class QuantizedSpec(PrecisionSpec):
    """Base of the formats that quantize linear layers inside the towers' blocks by torchao. The rest is in bfloat16."""

    emulate: bool = False
    """Emulates the products, slowly and on any device, to check numerics. false: the device computes them, which needs
    NVIDIA's compute capability 8.9 or higher (float8), 8.0 or higher (int8)."""

    min_width: int = option(1024, ge=16, unit="features")
    """Width from which linear layers are converted: those with two sides of at least
    min_width, and one of twice that. At the default fc1, fc2 and the fused qkv of blocks of width 1024 are converted,
    but not their square projections: in smaller layers rounding takes more time than the products save."""

    product_format: ClassVar[str | None] = "half"  # only linear layers of blocks compute in fewer bits

    least: ClassVar[Capability]
    """Compute capability that the products need."""

    def check_device_type(self, device_type: str) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"precision={self.kind} needs torchao, which is not installed: pip install 'clipx[quantized]', or use "
                "precision=amp_bf16"
            )
        require(
            self.emulate or device_type == "cuda",
            f"precision={self.kind} needs an NVIDIA device of compute capability {dotted(self.least)}, not "
            f"{device_type}: use amp_bf16, or precision.emulate=true to check numerics",
        )

    def check_device(self, device: torch.device) -> None:
        self.check_device_type(device.type)
        if not self.emulate:
            require_capability(device, self.least, f"precision={self.kind}", "amp_bf16")


@register("precision")
@frozen
class Float8Spec(QuantizedSpec):
    """float32 weights, bfloat16 products, and float8 products in the linear layers of blocks (arXiv:2209.05433).

    Inputs and weights are rounded to e4m3, gradients to e5m2, with one scale per tensor, recomputed at each product.
    Needs torchao.
    """

    kind: str = "float8"

    autocasts: ClassVar[bool] = True
    least: ClassVar[Capability] = ADA
    weight_format: ClassVar[str | None] = "float32"

    def build(self, device: torch.device) -> Precision:
        self.check_device(device)
        needs = describe_requirement(self.emulate, self.least)
        description = f"float32 weights, bfloat16 products, float8 linear layers; {needs}"
        return Precision(torch.float32, torch.bfloat16, device.type, description)

    def convert(self, blocks: Mapping[str, nn.Module]) -> list[str]:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # The number of tokens varies: products over tokens are padded to a multiple of 16, as the hardware requires.
        config = Float8LinearConfig(pad_inner_dim=True, emulate=self.emulate)
        names = linears_to_convert(blocks, self.min_width)
        for name, block in blocks.items():
            convert_to_float8_training(
                block, config=config, module_filter_fn=lambda _, layer, name=name: f"{name}.{layer}" in names
            )
        return names


@register("precision")
@frozen
class Int8Spec(QuantizedSpec):
    """bfloat16 weights with float32 master weights, and int8 products in the linear layers of the image tower's blocks.

    Each row of one factor and each column of the other has a scale, recomputed at each product, in forward and backward
    (torchao's int8 mixed-precision training). Needs torchao.
    """

    kind: str = "int8"

    least: ClassVar[Capability] = AMPERE
    weight_format: ClassVar[str | None] = "bfloat16"
    tunes_shapes: ClassVar[bool] = True

    def check(self, ema_decay: float | None, shards_parameters: bool) -> None:
        check_16_bit(self.kind, True, ema_decay, shards_parameters)

    def build(self, device: torch.device) -> Precision:
        self.check_device(device)
        needs = describe_requirement(self.emulate, self.least)
        description = f"bfloat16 weights{describe_masters(True)}, int8 linear layers; {needs}"
        return Precision(torch.bfloat16, None, device.type, description, master_weights=True)

    def convert(self, blocks: Mapping[str, nn.Module]) -> list[str]:
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_

        config = int8_mixed_precision_training(module_swap=True)
        # torchao searches 27 kernels for each shape, and the number of text tokens differs between batches.
        blocks = {name: block for name, block in blocks.items() if name.startswith("image.")}
        names = linears_to_convert(blocks, self.min_width)
        for name, block in blocks.items():
            quantize_(block, config, filter_fn=lambda _, layer, name=name: f"{name}.{layer}" in names)
        return names


def linears_to_convert(blocks: Mapping[str, nn.Module], min_width: int) -> list[str]:
    """Returns the names of the linear layers that `min_width` selects and whose sides are multiples of 16, as the
    hardware requires. Raises ConfigError."""
    names = [
        f"{name}.{layer}"
        for name, block in blocks.items()
        for layer, module in block.named_modules()
        if isinstance(module, torch.nn.Linear) and _pays(module.in_features, module.out_features, min_width)
    ]
    require_effect(
        bool(names),
        f"precision=float8 or int8 with precision.min_width={min_width}",
        "on this model, in whose blocks no linear layer has sides of at least min_width, one of twice that, in "
        "multiples of 16",
        "use precision=amp_bf16, or lower precision.min_width",
    )
    return names


def _pays(rows: int, columns: int, min_width: int) -> bool:
    sides = sorted((rows, columns))
    return rows % 16 == columns % 16 == 0 and sides[0] >= min_width and sides[1] >= 2 * min_width


def describe_requirement(emulate: bool, least: Capability) -> str:
    return "emulated, on any device" if emulate else f"needs NVIDIA of compute capability {dotted(least)}"
