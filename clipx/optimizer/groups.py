"""Parameter groups: learning-rate scale and weight decay by tower, layer and name pattern."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from clipx.config.lazy_torch import torch
from clipx.errors import ConfigError, require_effect
from clipx.optimizer.spec import DecayRule, Group, Named, OptimizerSpec

if TYPE_CHECKING:
    from clipx.model.clip import CLIP
    from clipx.objective.base import Objective


def parameter_groups(model: CLIP, objective: Objective, spec: OptimizerSpec) -> list[Group]:
    """Returns one group for each distinct treatment of parameters: fused and foreach kernels are launched per group.

    A group has `params` (pairs of name and parameter), `weight_decay` and `lr_scale`, a multiple of the scheduled rate.
    The objective's parameters are one group without decay and with `constant_lr`: their learning rate, or None for the
    model's. Raises ConfigError.
    """
    decay, keep = decayed(model, spec.decay_rule, spec.no_decay)
    scales = _lr_scales([*decay, *keep], model, spec)
    apart, options = spec.special(model, decay.keys())
    merged: dict[tuple[tuple[str, object], ...], list[tuple[str, torch.nn.Parameter]]] = {}
    for part, rate in ((decay, spec.weight_decay), (keep, 0.0)):
        for name, parameter in part.items():
            treated = {"weight_decay": rate, "lr_scale": scales[name], **(options if name in apart else {})}
            merged.setdefault(tuple(treated.items()), []).append((f"model.{name}", parameter))
    groups: list[Group] = [{"params": named, **dict(treated)} for treated, named in merged.items()]
    own = [(f"objective.{name}", p) for name, p in objective.named_parameters() if p.requires_grad]
    if own:
        groups.append({"params": own, "weight_decay": 0.0, "lr_scale": 1.0, "constant_lr": objective.constant_lr})
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of each group: its multiple of the scheduled rate `lr`, or its constant rate if any."""
    for group in optimizer.param_groups:
        constant = group.get("constant_lr")
        group["lr"] = lr * group["lr_scale"] if constant is None else constant


def decayed(model: CLIP, rule: DecayRule, no_decay: Sequence[str] = ()) -> tuple[Named, Named]:
    """Returns (parameters with weight decay, parameters without), by name in the model.

    Raises ConfigError for a pattern that matches no parameter.
    """
    exempt = model.class_tokens() | _matched(no_decay, [name for name, _ in model.named_parameters()])
    if rule is DecayRule.current:
        exempt |= model.positional_embeddings()
    decay: Named = {}
    keep: Named = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (keep if parameter.ndim <= 1 or name in exempt else decay)[name] = parameter
    return decay, keep


def _matched(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Returns the names that match at least one pattern. Raises ConfigError for a pattern without a match."""
    matched: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ConfigError(
                f"optimizer.no_decay=[{pattern}] matches no parameter of the model: correct or remove it; similar "
                f"names: {', '.join(near)}"
            )
        matched.update(found)
    return matched


def _lr_scales(names: Iterable[str], model: CLIP, spec: OptimizerSpec) -> dict[str, float]:
    """Returns each parameter's learning rate as a multiple of the scheduled rate."""
    towers = {"image": spec.image_lr_scale, "text": spec.text_lr_scale}
    scales = {name: towers.get(name.partition(".")[0], 1.0) for name in names}
    if spec.layer_decay == 1:
        return scales
    from clipx.model.layers import layers_above

    above = layers_above(model, f"optimizer.layer_decay={spec.layer_decay}")
    reason = "if only the highest layer of a tower is trained, such as its projection"
    require_effect(
        any(above[name] for name in scales), f"optimizer.layer_decay={spec.layer_decay}", reason, "lock fewer blocks"
    )
    return {name: scale * spec.layer_decay ** above[name] for name, scale in scales.items()}
