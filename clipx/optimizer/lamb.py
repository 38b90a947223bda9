"""LAMB, from timm."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, register
from clipx.optimizer.spec import AdaptiveSpec, Group

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


@register("optimizer")
@frozen
class LambSpec(AdaptiveSpec):
    """Adam's step with weight decay, scaled to the norm of each weight (arXiv:1904.00962, algorithm 2, φ the identity).

    Only weights with weight decay are scaled, as in the authors' code. Other weights, and weights of norm 0, take
    Adam's step.
    """

    kind: str = "lamb"
    """Type of the optimizer; set by optimizer=lamb."""

    shardable: ClassVar[bool] = True

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        return decay, {"always_adapt": True}  # without it timm silently disables scaling if weight_decay is 0

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lamb

        # None: timm clips to a norm of 1 by default, but optimizer.clip_norm clips already.
        optimizer: torch.optim.Optimizer = Lamb(
            groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, max_grad_norm=None
        )
        return optimizer
