"""AdamW, from torch."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas


@option("optimizer")
@frozen
class AdamWSpec(OptimizerSpec):
    """Adam with decoupled weight decay (arXiv:1711.05101), with torch's fused kernel."""

    kind: str = "adamw"
    """Type of the optimizer; set by optimizer=adamw, adamw_convnet or adamw_tiny."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    """Decay rates of the running means of the gradient and of its square: two numbers in [0, 1). The defaults are the
    reference for ViTs; [0.9,0.999] for ConvNets (optimizer=adamw_convnet)."""

    eps: float = 1e-6
    """Term added to the denominator. Above 0; 1e-6 for ViTs, 1e-8 for ConvNets."""

    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        check_betas(self.betas, "[0.9,0.98]")
        require(self.eps > 0, f"optimizer.eps={self.eps} must be above 0: 1e-6 for ViTs, 1e-8 for ConvNets")

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True)
