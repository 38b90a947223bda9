"""float8 products in the linear layers of blocks, by torchao."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, register
from clipx.precision.quantized import QuantizedSpec, describe_requirement, linears_to_convert
from clipx.precision.spec import ADA, Capability, Precision

if TYPE_CHECKING:
    from torch import nn


@register("precision")
@frozen
class Float8Spec(QuantizedSpec):
    """float32 weights, bfloat16 products, and float8 products in the linear layers of blocks (arXiv:2209.05433).

    Inputs and weights are rounded to e4m3, gradients to e5m2, with one scale per tensor, recomputed at each product.
    Needs torchao.
    """

    kind: str = "float8"
    """Name of this number format, selected by precision=float8. The key itself cannot be set."""

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
