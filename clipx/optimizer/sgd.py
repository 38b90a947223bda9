"""Stochastic gradient descent, from torch."""

from __future__ import annotations

from typing import ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec


@register("optimizer")
@frozen
class SGDSpec(OptimizerSpec):
    """Gradient descent with momentum, in the form of arXiv:1706.02677, eq. 9: v = momentum·v + g, w = w - lr·v.

    Weight decay is that of an L2 penalty: weight_decay·w is part of g. The step uses torch's fused kernel.
    """

    kind: str = "sgd"
    """Type of the optimizer; set by optimizer=sgd."""

    momentum: float = option(0.9, ge=0, lt=1, hint="0.9 is usual")
    """Factor of the velocity v in v = momentum·v + g; 0.9 is usual. 0: no momentum, which
    needs nesterov=false."""

    nesterov: bool = True
    """Nesterov momentum: w = w - lr·(g + momentum·v). Needs momentum above 0."""

    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            self.momentum > 0 or not self.nesterov,
            f"optimizer.momentum={self.momentum} disables optimizer.nesterov=true: give momentum above 0, or "
            "nesterov=false",
        )

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=True)
