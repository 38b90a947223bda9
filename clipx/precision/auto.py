"""Number format chosen by the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.precision.spec import AmpBf16Spec, Fp32Spec, Precision, PrecisionSpec


@option("precision")
@dataclass(kw_only=True, slots=True)
class AutoSpec(PrecisionSpec):
    """amp_bf16 on an accelerator with bfloat16 (NVIDIA: compute capability 8.0 or higher), fp32 on other devices.

    Both have float32 weights, so a checkpoint of one resumes with the other. On the CPU: fp32.
    """

    kind: str = "auto"
    """Name of this number format, selected by precision=auto. The key itself cannot be set."""

    autocasts: ClassVar[bool] = True  # or the format that it chose is refused

    def resolve(self, bf16: bool) -> PrecisionSpec:
        return AmpBf16Spec() if bf16 else Fp32Spec()

    def build(self, device: torch.device) -> Precision:
        return self.on(device).build(device)
