"""AdamW, from torch."""

from __future__ import annotations

from typing import ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, register
from clipx.optimizer.spec import AdaptiveSpec, Group


@register("optimizer")
@frozen
class AdamWSpec(AdaptiveSpec):
    """Adam with decoupled weight decay (arXiv:1711.05101), with torch's fused kernel."""

    kind: str = "adamw"
    """Type of the optimizer; set by optimizer=adamw, adamw_convnet or adamw_tiny."""

    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True)
