"""Locked weights: a tower, or its lower part, stays as it is while the rest learns from it (LiT, arXiv:2111.07991)."""

from __future__ import annotations

from timm.layers import RmsNorm, RmsNorm2d
from torch import nn

from clipx.errors import require
from clipx.model.batchnorm import BATCH_NORM
from clipx.model.clip import CLIP
from clipx.model.layers import layers
from clipx.model.spec import ImageTowerSpec, ModelSpec, TextTowerSpec

NORMS = (BATCH_NORM, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, RmsNorm, RmsNorm2d)


def lock(model: CLIP, spec: ModelSpec) -> None:
    """Takes out of training what `spec` locks: no gradient, no optimizer state, no decay, nothing sent between ranks.

    autograd keeps nothing of what lies below the lowest weight that learns; a tower locked whole makes no graph.
    With its norms locked a BatchNorm is in evaluation mode for good. Dropout goes on as configured. Raises ConfigError.
    """
    for side, tower in (("image", spec.image), ("text", spec.text)):
        if tower.lock != "none":
            _lock_tower(model, side, tower)


def locked_count(model: nn.Module) -> int:
    """Numbers in a module's parameters that do not learn."""
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)


def _lock_tower(model: CLIP, side: str, spec: ImageTowerSpec | TextTowerSpec) -> None:
    parameters = {name: p for name, p in model.named_parameters() if name.startswith(f"{side}.")}
    whole = spec.lock in ("all", "norms")
    locked = set(parameters) if whole else _low(model, side, int(spec.lock))
    norms = {
        name: owned
        for name, module in model.named_modules()
        if isinstance(module, NORMS)
        and name.startswith(f"{side}.")
        and (owned := {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}) <= locked
        and (owned or whole)
    }
    if spec.lock == "norms":
        locked = set().union(*norms.values())
    if spec.lock_norms:
        model.keep_still(name for name in norms if isinstance(model.get_submodule(name), BATCH_NORM))
    else:
        require(
            bool(norms),
            f"model.{side}.lock_norms=false has no effect: nothing that model.{side}.lock={spec.lock} locks is a norm; "
            "leave it out",
        )
        locked -= set().union(*norms.values())
    for name in locked:
        parameters[name].requires_grad_(False)


def _low(model: CLIP, side: str, kept: int) -> set[str]:
    """The names of what lies below the tower's `kept` highest blocks."""
    key = f"model.{side}.lock={kept}"
    places = {name: place for name, place in layers(model, key).items() if name.startswith(f"{side}.")}
    blocks = max(top for _, top in places.values()) - 1
    require(
        kept <= blocks,
        f"{key} keeps more blocks than the {blocks} of the tower from being locked: give at most {blocks}, or none",
    )
    return {name for name, (layer, top) in places.items() if top - layer > kept}
