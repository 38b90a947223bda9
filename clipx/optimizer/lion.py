"""Lion, from timm."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.optimizer.spec import Group, OptimizerSpec

if TYPE_CHECKING:
    import torch


@register("optimizer")
@frozen
class LionSpec(OptimizerSpec):
    """The sign of a running mean of the gradient, with decoupled weight decay (arXiv:2302.06675, algorithm 2).

    Each weight changes by lr, independent of the size of its gradient: use a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay larger by the same factor.
    """

    kind: str = "lion"
    """Type of the optimizer; set by optimizer=lion."""

    betas: list[float] = option([0.9, 0.99], length=2, ge=0, lt=1)
    """Two decay rates: the first interpolates gradient and running mean for the step, the second updates the
    running mean. The defaults are the paper's."""

    shardable: ClassVar[bool] = True

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lion

        optimizer: torch.optim.Optimizer = Lion(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]))
        return optimizer
