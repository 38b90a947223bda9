"""Base of the number formats that quantize linear layers by torchao."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.specs import frozen
from clipx.errors import ConfigError, require, require_effect
from clipx.precision.spec import Capability, PrecisionSpec, dotted, require_capability

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

    @property
    def product_format(self) -> str:
        return "half"  # only linear layers of blocks compute in fewer bits

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
