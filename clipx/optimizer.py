"""Optimizers: which parameters decay, and the update rule, from torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from clipx.config import MISSING, option
from clipx.errors import require
from clipx.lazy import torch

if TYPE_CHECKING:
    from clipx.model.clip import CLIP
    from clipx.objective.base import Objective


class DecayRule(StrEnum):
    """Which weights decay. Norms, biases, class tokens and the temperature never do."""

    published = "published"  # the positional embeddings do: how the published checkpoints were trained
    current = "current"  # the positional embeddings do not: open_clip's rule today


@dataclass(kw_only=True, slots=True)
class OptimizerSpec:
    kind: str = MISSING
    lr: float = 5e-4  # the peak; the schedule scales it
    weight_decay: float = 0.2
    decay_rule: DecayRule = DecayRule.current
    clip_norm: float | None = None  # largest global gradient norm; null: no clipping

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optimizer.lr={self.lr} must be above 0: the reference is 5e-4")
        require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay} must be at least 0")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"optimizer.clip_norm={self.clip_norm} must be above 0; null switches clipping off",
        )

    def build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        """The optimizer over parameter groups, each with its own weight decay."""
        raise NotImplementedError


@option("optimizer")
@dataclass(kw_only=True, slots=True)
class AdamWSpec(OptimizerSpec):
    """Adam with decoupled weight decay (arXiv:1711.05101); fused on the devices that have it."""

    kind: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    eps: float = 1e-6

    def __post_init__(self) -> None:
        OptimizerSpec.__post_init__(self)
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optimizer.betas={self.betas} must be two numbers in [0, 1), e.g. [0.9,0.98]",
        )
        require(self.eps > 0, f"optimizer.eps={self.eps} must be above 0: 1e-6 for ViTs, 1e-8 for ConvNets")

    def build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True)


Named = dict[str, "torch.nn.Parameter"]


def parameter_groups(model: CLIP, objective: Objective, spec: OptimizerSpec) -> list[dict[str, object]]:
    """Groups, with names: what decays, what does not, and the objective's own parameters, which never decay."""
    decay, keep = decayed(model, spec.decay_rule)
    own = {f"objective.{name}": p for name, p in objective.named_parameters() if p.requires_grad}
    towers = [
        ({f"model.{n}": p for n, p in part.items()}, rate) for part, rate in ((decay, spec.weight_decay), (keep, 0.0))
    ]
    groups = [{"params": list(named.items()), "weight_decay": rate} for named, rate in towers if named]
    if own:
        groups.append({"params": list(own.items()), "weight_decay": 0.0, "constant_lr": objective.constant_lr})
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives each group the scheduled rate `lr`, or its own constant one where it has one."""
    for group in optimizer.param_groups:
        constant = group.get("constant_lr")
        group["lr"] = lr if constant is None else constant


def decayed(model: CLIP, rule: DecayRule) -> tuple[Named, Named]:
    """(parameters that decay, parameters that do not), by name in the model."""
    exempt = set(model.class_tokens())
    if rule is DecayRule.current:
        exempt |= model.positional_embeddings()
    decay: Named = {}
    keep: Named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (keep if parameter.ndim <= 1 or name in exempt else decay)[name] = parameter
    return decay, keep
