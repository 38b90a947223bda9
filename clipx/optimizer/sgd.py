"""Stochastic gradient descent, from torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec


@option("optimizer")
@dataclass(kw_only=True, slots=True)
class SGDSpec(OptimizerSpec):
    """Gradient descent with momentum, in the form of arXiv:1706.02677, eq. 9: v = momentum·v + g, w = w - lr·v.

    Weight decay is that of an L2 penalty: weight_decay·w is part of g. Fused on the devices that have it.
    """

    kind: str = "sgd"
    lr: float = 0.01
    weight_decay: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = True  # the step looks ahead: w = w - lr·(g + momentum·v)
    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        require(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must lie in [0, 1): 0.9 is usual")
        require(
            self.momentum > 0 or not self.nesterov,
            f"optimizer.momentum={self.momentum} leaves optimizer.nesterov=true without effect: give momentum above 0, "
            "or nesterov=false",
        )

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=True)
