"""Base class of the optimizers' options: weight decay, learning-rate scales, clipping, non-finite steps and the average
of the weights. Each optimizer has one file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen

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

    lr: float = option(5e-4, gt=0, hint="the reference of AdamW is 5e-4")
    """Peak learning rate; the schedule scales it. The reference for AdamW is 5e-4."""

    weight_decay: float = option(0.2, ge=0, hint="0 disables weight decay")
    """Weight decay of the weights that decay_rule selects."""

    decay_rule: DecayRule = DecayRule.current
    """Selection of the weights with weight decay. published: all but norms, biases, class tokens and the temperature,
    as in the training of the published checkpoints and with AdamW of open_clip 3.3. current: also without positional
    embeddings, as in open_clip (main)."""

    no_decay: list[str] = field(default_factory=list)
    """Further parameters without weight decay: patterns of parameter names, e.g. [text.token_embedding.*]. Each pattern
    must match a parameter of the model."""

    image_lr_scale: float = option(1.0, gt=0, when="model.image.lock != all or not model.image.lock_norms")
    """Learning rate of the image tower as a multiple of lr."""

    text_lr_scale: float = option(1.0, gt=0, when="model.text.lock != all or not model.text.lock_norms")
    """Learning rate of the text tower as a multiple of lr."""

    layer_decay: float = option(1.0, gt=0, le=1, hint="1.0 trains all blocks at the same rate")
    """Learning rate of each layer of a tower as a multiple of that of the layer above it (BEiT, arXiv:2106.08254). The
    projection has the full rate, the highest block layer_decay times it. 1: all layers have the same learning rate."""

    clip_norm: float | None = option(None, gt=0, hint="null disables clipping")
    """Largest global gradient norm; larger gradients are scaled down to it. null: no clipping."""

    non_finite: NonFinite = NonFinite.stop
    """Reaction to a loss or a gradient that is infinite or NaN on any rank; the step is always skipped. stop: stop the
    run. skip: skip the batch. rollback: restore the weights of the last checkpoint and continue with the data after
    this batch (arXiv:2204.02311, 5.1)."""

    non_finite_limit: int = option(10, ge=1, when="non_finite != stop")
    """Largest number of consecutive non-finite steps; one more stops the run."""

    ema_decay: float | None = option(None, gt=0, lt=1, hint="0.9999 is usual, null disables the average")
    """Decay rate of an exponential moving average of the weights, e.g. 0.9999. Evaluators then use the average. null:
    no average."""

    shardable: ClassVar[bool] = False
    """True if the step is correct when each rank has a shard of every parameter, as with distributed=fsdp."""

    fused: ClassVar[bool] = False
    """True if the step is one fused kernel, so that there is nothing to compile."""

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        """Returns the optimizer over the groups of `parameter_groups`."""
        raise NotImplementedError

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        """Returns the names of the parameters with special group options of this optimizer, and these options.

        `decay`: names of the parameters with weight decay. Raises ConfigError.
        """
        return (), {}


@frozen
class AdaptiveSpec(OptimizerSpec):
    """Base class of the options of optimizers with running means of the gradient and of its square, as Adam's."""

    betas: list[float] = option([0.9, 0.98], length=2, ge=0, lt=1, hint="[0.9,0.98] for ViTs, [0.9,0.999] for ConvNets")
    """Decay rates of the running means of the gradient and of its square. [0.9,0.98] is the reference for ViTs,
    [0.9,0.999] for ConvNets (optimizer=adamw_convnet)."""

    eps: float = option(1e-6, gt=0, hint="1e-6 for ViTs, 1e-8 for ConvNets")
    """Term added to the denominator: 1e-6 for ViTs, 1e-8 for ConvNets."""
