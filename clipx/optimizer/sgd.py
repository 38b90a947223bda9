"""Stochastic gradient descent, from torch."""

from __future__ import annotations

from typing import ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec


@option("optimizer")
@frozen
class SGDSpec(OptimizerSpec):
    """Gradient descent with momentum, in the form of arXiv:1706.02677, eq. 9: v = momentum·v + g, w = w - lr·v.

    Weight decay is that of an L2 penalty: weight_decay·w is part of g. The step uses torch's fused kernel.
    """

    kind: str = "sgd"
    """Type of the optimizer; set by optimizer=sgd."""

    lr: float = 0.01
    """Peak learning rate; the schedule scales it. Above 0. The default is the best of 0.003 to 0.1 for model=tiny at a
    batch size of 64."""

    weight_decay: float = 1e-4
    """L2 penalty of the weights that decay_rule selects: adds weight_decay·w to the gradient. At least 0. The default
    is that for ImageNet (arXiv:1706.02677)."""

    momentum: float = 0.9
    """Factor of the velocity v in v = momentum·v + g, in [0, 1); 0.9 is usual. 0: no momentum, which needs
    nesterov=false."""

    nesterov: bool = True
    """Nesterov momentum: w = w - lr·(g + momentum·v). Needs momentum above 0."""

    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        require(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must be in [0, 1): 0.9 is usual")
        require(
            self.momentum > 0 or not self.nesterov,
            f"optimizer.momentum={self.momentum} disables optimizer.nesterov=true: give momentum above 0, or "
            "nesterov=false",
        )

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=True)
