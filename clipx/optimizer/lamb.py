"""LAMB, from timm."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import option
from clipx.errors import require
from clipx.optimizer.spec import Group, OptimizerSpec, check_betas

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


@option("optimizer")
@dataclass(kw_only=True, slots=True)
class LambSpec(OptimizerSpec):
    """Adam's step with decay, scaled to the norm of each weight (arXiv:1904.00962, algorithm 2, φ the identity).

    Scaled are the weights that decay, as in the authors' code; the others, and a weight of norm 0, take Adam's step.
    """

    kind: str = "lamb"
    lr: float = 2e-3
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-6
    shardable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        check_betas(self.betas, "[0.9,0.999]")
        require(self.eps > 0, f"optimizer.eps={self.eps} must be above 0: 1e-6 is usual")

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        return decay, {"always_adapt": True}  # else timm stops scaling, silently, where weight_decay is 0

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lamb

        # timm would clip to a norm of 1 on its own: clipping is clip_norm's.
        optimizer: torch.optim.Optimizer = Lamb(
            groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, max_grad_norm=None
        )
        return optimizer
