"""In which number format the towers compute. Embeddings, temperature and loss are float32 or wider in all of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from clipx.config import MISSING, option
from clipx.errors import ConfigError
from clipx.lazy import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype`: of the weights. `autocast`: of the towers' matrix products, None for the weights' own."""

    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    device_type: str

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)


@dataclass(kw_only=True, slots=True)
class PrecisionSpec:
    kind: str = MISSING

    def build(self, device: torch.device) -> Precision:
        raise NotImplementedError


@option("precision")
@dataclass(kw_only=True, slots=True)
class Fp32Spec(PrecisionSpec):
    kind: str = "fp32"
    tf32: bool = False  # matrix products of the towers in TF32 on NVIDIA devices: faster, 10 bits of mantissa

    def build(self, device: torch.device) -> Precision:
        if self.tf32 and device.type != "cuda":
            raise ConfigError(f"precision.tf32=true has no effect on {device.type}: set it to false, or train on cuda")
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        return Precision(torch.float32, None, device.type)


@option("precision")
@dataclass(kw_only=True, slots=True)
class AmpBf16Spec(PrecisionSpec):
    """float32 weights, bfloat16 products. Needs no loss scaling: bfloat16 has float32's range."""

    kind: str = "amp_bf16"

    def build(self, device: torch.device) -> Precision:
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError("precision=amp_bf16 needs a device with bfloat16 (compute capability 8.0): use fp32")
        return Precision(torch.float32, torch.bfloat16, device.type)


@option("precision")
@dataclass(kw_only=True, slots=True)
class Fp64Spec(PrecisionSpec):
    """Everything in float64: for checking numerics, not for training at any size."""

    kind: str = "fp64"

    def build(self, device: torch.device) -> Precision:
        return Precision(torch.float64, None, device.type)
