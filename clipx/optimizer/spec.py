"""Base class of the optimizers' options: weight decay, learning-rate scales, clipping, non-finite steps and the average
of the weights; and the optimizers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import require, require_effect

if TYPE_CHECKING:
    from clipx.model.clip import CLIP

Group = dict[str, object]
Named = dict[str, "torch.nn.Parameter"]


class DecayRule(StrEnum):
    """Rules that select the weights with weight decay. Norms, biases, class tokens and the temperature never decay."""

    published = "published"
    current = "current"


class NonFinite(StrEnum):
    """Reactions to a loss or a gradient that is infinite or NaN on any rank. The optimizer step is always skipped."""

    stop = "stop"
    skip = "skip"
    rollback = "rollback"


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


@register("optimizer")
@frozen
class AdamWSpec(AdaptiveSpec):
    """Adam with decoupled weight decay (arXiv:1711.05101), with torch's fused kernel."""

    kind: str = "adamw"

    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True)


@register("optimizer")
@frozen
class SGDSpec(OptimizerSpec):
    """Gradient descent with momentum, in the form of arXiv:1706.02677, eq. 9: v = momentum·v + g, w = w - lr·v.

    Weight decay is that of an L2 penalty: weight_decay·w is part of g. The step uses torch's fused kernel.
    """

    kind: str = "sgd"

    momentum: float = option(0.9, ge=0, lt=1, hint="0.9 is usual")
    """Factor of the velocity v in v = momentum·v + g; 0.9 is usual. 0: no momentum, which
    needs nesterov=false."""

    nesterov: bool = True
    """Nesterov momentum: w = w - lr·(g + momentum·v). Needs momentum above 0."""

    shardable: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            self.momentum > 0 or not self.nesterov,
            f"optimizer.momentum={self.momentum} disables optimizer.nesterov=true: give momentum above 0, or "
            "nesterov=false",
        )

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, fused=True)


@register("optimizer")
@frozen
class LambSpec(AdaptiveSpec):
    """Adam's step with weight decay, scaled to the norm of each weight (arXiv:1904.00962, algorithm 2, φ the identity).

    Only weights with weight decay are scaled, as in the authors' code. Other weights, and weights of norm 0, take
    Adam's step.
    """

    kind: str = "lamb"

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


@register("optimizer")
@frozen
class LionSpec(OptimizerSpec):
    """The sign of a running mean of the gradient, with decoupled weight decay (arXiv:2302.06675, algorithm 2).

    Each weight changes by lr, independent of the size of its gradient: use a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay larger by the same factor.
    """

    kind: str = "lion"

    betas: list[float] = option([0.9, 0.99], length=2, ge=0, lt=1)
    """Two decay rates: the first interpolates gradient and running mean for the step, the second updates the
    running mean. The defaults are the paper's."""

    shardable: ClassVar[bool] = True

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import Lion

        optimizer: torch.optim.Optimizer = Lion(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]))
        return optimizer


@register("optimizer")
@frozen
class MuonSpec(AdaptiveSpec):
    """The running mean of a hidden matrix's gradient, orthogonalized by five Newton-Schulz steps in bfloat16
    (https://kellerjordan.github.io/posts/muon/). The factor 0.2·√max(rows, columns) scales it to the size of AdamW's
    step, so that lr and weight_decay of AdamW apply to all parameters (arXiv:2502.16982).

    Hidden matrices are the weights of linear layers and convolutions inside the towers' blocks: a fused qkv as one
    matrix, a kernel as out × (in·height·width). AdamW trains the rest: embeddings (of patches, tokens, positions),
    stems, depthwise and grouped kernels, pooling heads, projections, norms, biases, the objective's parameters, and
    low-rank adapters, with betas and eps: a factor of a product is defined only up to an invertible matrix.

    With distributed=fsdp each rank orthogonalizes its share of the matrices, gathered for it.
    """

    kind: str = "muon"

    momentum: float = option(0.95, gt=0, lt=1, hint="0.95 is usual")
    """Decay rate of the running mean of a hidden matrix's gradient; 0.95 is usual."""

    nesterov: bool = True
    """Nesterov momentum for the hidden matrices. The default is that of Muon's author."""

    shardable: ClassVar[bool] = True

    def special(self, model: CLIP, decay: Collection[str]) -> tuple[Collection[str], Group]:
        from clipx.model.layers import hidden_matrices

        # Here eps is the smallest norm that Newton-Schulz divides by; in the other groups it is AdamW's.
        options: Group = {"use_muon": True, "nesterov": self.nesterov, "eps": 1e-7}
        matrices = hidden_matrices(model, "optimizer=muon")
        trains_some = not model.spec.has_adapters or bool(matrices & set(decay))
        reason = "if no hidden matrix is trained, and adapters are trained by AdamW"
        require_effect(trains_some, "optimizer=muon", reason, "choose optimizer=adamw")
        return matrices, options

    def build(self, groups: list[Group]) -> torch.optim.Optimizer:
        from clipx.optimizer.sharded_muon import ShardedMuon

        return ShardedMuon(
            [{"use_muon": False, **group} for group in groups],  # without it timm selects matrices by their shape
            lr=self.lr,
            momentum=self.momentum,
            nesterov=False,  # True would make timm use NAdamW instead of AdamW
            ns_coefficients="original",
            adjust_lr_fn="match_rms_adamw",
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
        )
