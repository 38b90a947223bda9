"""Lion, from timm."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, option
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas

if TYPE_CHECKING:
    import torch


@option("optimizer")
@frozen
class LionSpec(OptimizerSpec):
    """The sign of a running mean of the gradient, with decoupled weight decay (arXiv:2302.06675, algorithm 2).

    Each weight changes by lr, independent of the size of its gradient: use a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay larger by the same factor.
    """

    kind: str = "lion"
    """Type of the optimizer; set by optimizer=lion."""

    lr: float = 1e-4
    """Peak learning rate; the schedule scales it. Above 0. The default is a fifth of AdamW's (arXiv:2302.06675,
    section 5)."""

    weight_decay: float = 1.0
    """Weight decay of the weights that decay_rule selects. At least 0. The default is five times AdamW's
    (arXiv:2302.06675, section 5)."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """Two decay rates in [0, 1): the first interpolates gradient and running mean for the step, the second updates the
    running mean. The defaults are the paper's."""

    shardable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        check_betas(self.betas, "[0.9,0.99]")

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lion

        optimizer: torch.optim.Optimizer = Lion(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]))
        return optimizer
