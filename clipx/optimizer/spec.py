"""Optimizers: which parameters decay, at which share of the rate each learns, and the update rule. One file each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import MISSING
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.model.clip import CLIP

Group = dict[str, object]
Named = dict[str, "torch.nn.Parameter"]


class DecayRule(StrEnum):
    """Which weights decay. Norms, biases, class tokens and the temperature never do."""

    published = "published"  # the positional embeddings do: how the published checkpoints were trained
    current = "current"  # the positional embeddings do not: open_clip's rule today


class NonFinite(StrEnum):
    """What follows a loss or a gradient that is infinite or NaN, on any rank. The step is never made."""

    stop = "stop"  # the run ends; the last checkpoint is from before
    skip = "skip"  # the batch is left out
    rollback = "rollback"  # the weights of the last checkpoint, and the data after this batch (arXiv:2204.02311, 5.1)


@dataclass(kw_only=True, slots=True)
class OptimizerSpec:
    """The base of all optimizers' options: what each of them heeds."""

    kind: str = MISSING
    lr: float = 5e-4  # the peak; the schedule scales it
    weight_decay: float = 0.2
    decay_rule: DecayRule = DecayRule.current
    no_decay: list[str] = field(default_factory=list)  # more that does not decay: patterns as text.token_embedding.*
    image_lr_scale: float = 1.0  # the image tower's learning rate, as a multiple of lr
    text_lr_scale: float = 1.0  # the text tower's
    layer_decay: float = 1.0  # each block's rate as a share of that of the block above it (arXiv:2106.08254)
    clip_norm: float | None = None  # largest global gradient norm; null: no clipping
    non_finite: NonFinite = NonFinite.stop
    non_finite_limit: int = 10  # so many steps in a row that are not finite end the run even so
    ema_decay: float | None = None  # of a moving average of the weights, which is then evaluated; null: none is kept
    shardable: ClassVar[bool] = False
    """Whether its step is right where each rank has a part of every parameter, as under distributed=fsdp."""
    fused: ClassVar[bool] = False
    """Whether its step is one fused kernel, which leaves nothing to compile."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optimizer.lr={self.lr} must be above 0: the reference is 5e-4")
        require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay} must be at least 0")
        for name, scale in (("image_lr_scale", self.image_lr_scale), ("text_lr_scale", self.text_lr_scale)):
            require(scale > 0, f"optimizer.{name}={scale} must be above 0: 1.0 trains the tower at optimizer.lr")
        require(
            0 < self.layer_decay <= 1,
            f"optimizer.layer_decay={self.layer_decay} must lie in (0, 1]: 1.0 trains all blocks at one rate",
        )
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"optimizer.clip_norm={self.clip_norm} must be above 0; null switches clipping off",
        )
        require(self.non_finite_limit >= 1, f"optimizer.non_finite_limit={self.non_finite_limit} must be at least 1")
        require(
            self.non_finite is not NonFinite.stop or self.non_finite_limit == 10,
            f"optimizer.non_finite_limit={self.non_finite_limit} has no effect on optimizer.non_finite=stop: choose "
            "skip or rollback, or leave it out",
        )
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"optimizer.ema_decay={self.ema_decay} must lie between 0 and 1, e.g. 0.9999; null keeps no average",
        )

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        """The optimizer over the groups of `parameter_groups`."""
        raise NotImplementedError

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        """Parameters that this optimizer treats apart, by name in the model, and what their groups say of it.

        `decay` are the names of those that weight decay is for. Raises ConfigError.
        """
        return (), {}


def check_betas(betas: Sequence[float], usual: str) -> None:
    """Raises ConfigError unless `betas` are two decay rates of running means."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"optimizer.betas={betas} must be two numbers in [0, 1), e.g. {usual}",
    )
