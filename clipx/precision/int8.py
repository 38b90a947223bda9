"""int8 products in the linear layers of blocks, by torchao."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, register
from clipx.precision.quantized import QuantizedSpec, describe_requirement, linears_to_convert
from clipx.precision.spec import AMPERE, Capability, Precision, check_16_bit, describe_masters

if TYPE_CHECKING:
    from torch import nn


@register("precision")
@frozen
class Int8Spec(QuantizedSpec):
    """bfloat16 weights with float32 master weights, and int8 products in the linear layers of the image tower's blocks.

    Each row of one factor and each column of the other has a scale, recomputed at each product, in forward and backward
    (torchao's int8 mixed-precision training). Needs torchao.
    """

    kind: str = "int8"
    """Name of this number format, selected by precision=int8. The key itself cannot be set."""

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
