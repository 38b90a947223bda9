"""LAMB, from timm."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


@option("optimizer")
@frozen
class LambSpec(OptimizerSpec):
    """Adam's step with weight decay, scaled to the norm of each weight (arXiv:1904.00962, algorithm 2, φ the identity).

    Only weights with weight decay are scaled, as in the authors' code. Other weights, and weights of norm 0, take
    Adam's step.
    """

    kind: str = "lamb"
    """Type of the optimizer; set by optimizer=lamb."""

    lr: float = 2e-3
    """Peak learning rate; the schedule scales it. Above 0. The paper scales it with the square root of the batch size:
    1.8e-3 at 4,096, 5e-3 at 32,768."""

    weight_decay: float = 0.1
    """Weight decay of the weights that decay_rule selects. At least 0. The default is that of FastCLIP
    (arXiv:2407.01445)."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the running means of the gradient and of its square: two numbers in [0, 1). The defaults are the
    paper's."""

    eps: float = 1e-6
    """Term added to the denominator. Above 0. The default is the paper's."""

    shardable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        check_betas(self.betas, "[0.9,0.999]")
        require(self.eps > 0, f"optimizer.eps={self.eps} must be above 0: 1e-6 is usual")

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        return decay, {"always_adapt": True}  # without it timm silently disables scaling if weight_decay is 0

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lamb

        # None: timm clips to a norm of 1 by default, but optimizer.clip_norm clips already.
        optimizer: torch.optim.Optimizer = Lamb(
            groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, max_grad_norm=None
        )
        return optimizer
