"""Lion, from timm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import option
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas

if TYPE_CHECKING:
    import torch


@option("optimizer")
@dataclass(kw_only=True, slots=True)
class LionSpec(OptimizerSpec):
    """The sign of a running mean of the gradient, with decoupled weight decay (arXiv:2302.06675, algorithm 2).

    Every weight moves by lr, whatever its gradient: rates are 3 to 10 times smaller than AdamW's, and the decay that
    much larger.
    """

    kind: str = "lion"
    lr: float = 1e-4
    weight_decay: float = 1.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])  # of the step; of the mean that is kept
    shardable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        check_betas(self.betas, "[0.9,0.99]")

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lion

        optimizer: torch.optim.Optimizer = Lion(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]))
        return optimizer
