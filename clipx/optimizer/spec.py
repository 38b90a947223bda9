"""Base class of the optimizers' options: weight decay, learning-rate scales, clipping, non-finite steps and the average
of the weights. Each optimizer has one file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import MISSING, frozen
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.model.clip import CLIP

Group = dict[str, object]
Named = dict[str, "torch.nn.Parameter"]


class DecayRule(StrEnum):
    """Rules that select the weights with weight decay. Norms, biases, class tokens and the temperature never decay."""

    published = "published"
    """Positional embeddings decay, as in the training of the published checkpoints."""

    current = "current"
    """Positional embeddings do not decay: the rule of open_clip (main), and of open_clip 3.3 with `--opt timm/…`."""


class NonFinite(StrEnum):
    """Reactions to a loss or a gradient that is infinite or NaN on any rank. The optimizer step is always skipped."""

    stop = "stop"
    """Stop the run; the last checkpoint is older than the step."""

    skip = "skip"
    """Skip the batch."""

    rollback = "rollback"
    """Restore the weights of the last checkpoint; continue with the data after this batch (arXiv:2204.02311, 5.1)."""


@frozen
class OptimizerSpec:
    """Base class of the options of all optimizers: the options that every optimizer has."""

    kind: str = MISSING
    """Type of the optimizer; set by the choice of an option, e.g. optimizer=adamw."""

    lr: float = 5e-4
    """Peak learning rate; the schedule scales it. Above 0. The reference for AdamW is 5e-4."""

    weight_decay: float = 0.2
    """Weight decay of the weights that decay_rule selects. At least 0."""

    decay_rule: DecayRule = DecayRule.current
    """Selection of the weights with weight decay. published: all but norms, biases, class tokens and the temperature,
    as in the training of the published checkpoints and with AdamW of open_clip 3.3. current: also without positional
    embeddings, as in open_clip (main)."""

    no_decay: list[str] = field(default_factory=list)
    """Further parameters without weight decay: patterns of parameter names, e.g. [text.token_embedding.*]. Each pattern
    must match a parameter of the model."""

    image_lr_scale: float = 1.0
    """Learning rate of the image tower as a multiple of lr. Above 0."""

    text_lr_scale: float = 1.0
    """Learning rate of the text tower as a multiple of lr. Above 0."""

    layer_decay: float = 1.0
    """Learning rate of each layer of a tower as a multiple of that of the layer above it, in (0, 1] (BEiT,
    arXiv:2106.08254). The projection has the full rate, the highest block layer_decay times it. 1: all layers have the
    same learning rate."""

    clip_norm: float | None = None
    """Largest global gradient norm; larger gradients are scaled down to it. Above 0. null: no clipping."""

    non_finite: NonFinite = NonFinite.stop
    """Reaction to a loss or a gradient that is infinite or NaN on any rank; the step is always skipped. stop: stop the
    run. skip: skip the batch. rollback: restore the weights of the last checkpoint and continue with the data after
    this batch (arXiv:2204.02311, 5.1)."""

    non_finite_limit: int = 10
    """Largest number of consecutive non-finite steps with non_finite=skip or rollback; one more stops the run. At least
    1. Without effect on non_finite=stop, where another value than the default is an error."""

    ema_decay: float | None = None
    """Decay rate of an exponential moving average of the weights, in (0, 1), e.g. 0.9999. Evaluators then use the
    average. null: no average."""

    shardable: ClassVar[bool] = False
    """True if the step is correct when each rank has a shard of every parameter, as with distributed=fsdp."""

    fused: ClassVar[bool] = False
    """True if the step is one fused kernel, so that there is nothing to compile."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optimizer.lr={self.lr} must be above 0: the reference of AdamW is 5e-4")
        require(
            self.weight_decay >= 0,
            f"optimizer.weight_decay={self.weight_decay} must be at least 0: 0 disables weight decay",
        )
        for name, scale in (("image_lr_scale", self.image_lr_scale), ("text_lr_scale", self.text_lr_scale)):
            require(scale > 0, f"optimizer.{name}={scale} must be above 0: 1.0 trains the tower at optimizer.lr")
        require(
            0 < self.layer_decay <= 1,
            f"optimizer.layer_decay={self.layer_decay} must be in (0, 1]: 1.0 trains all blocks at the same rate",
        )
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"optimizer.clip_norm={self.clip_norm} must be above 0; null disables clipping",
        )
        require(
            self.non_finite_limit >= 1,
            f"optimizer.non_finite_limit={self.non_finite_limit} must be at least 1: the default is 10",
        )
        require(
            self.non_finite is not NonFinite.stop or self.non_finite_limit == 10,
            f"optimizer.non_finite_limit={self.non_finite_limit} has no effect on optimizer.non_finite=stop: choose "
            "skip or rollback, or remove it",
        )
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"optimizer.ema_decay={self.ema_decay} must be in (0, 1), e.g. 0.9999; null disables the average",
        )

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        """Returns the optimizer over the groups of `parameter_groups`."""
        raise NotImplementedError

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        """Returns the names of the parameters with special group options of this optimizer, and these options.

        `decay`: names of the parameters with weight decay. Raises ConfigError.
        """
        return (), {}


def check_betas(betas: Sequence[float], usual: str) -> None:
    """Raises ConfigError unless `betas` are two decay rates of running means."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"optimizer.betas={betas} must be two numbers in [0, 1), e.g. {usual}",
    )
