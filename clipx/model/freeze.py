"""Frozen weights: excludes a tower, or its lower part, from training (LiT, arXiv:2111.07991)."""

from __future__ import annotations

from timm.layers import RmsNorm, RmsNorm2d
from torch import nn

from clipx.errors import require, require_effect
from clipx.model.batchnorm import BATCH_NORM
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec

NORMS = (*BATCH_NORM, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, RmsNorm, RmsNorm2d)


def freeze(model: CLIP, spec: ModelSpec) -> None:
    """Freezes the parameters that `lock` selects: no gradient, optimizer state, weight decay or communication.

    A tower with adapters is frozen as by lock=0; its adapters are added later, by `add_adapters`.

    autograd stores nothing below the lowest trained weight and builds no graph for a frozen tower. A BatchNorm whose
    parameters are frozen stays in evaluation mode, and so do a tower and an image trunk without trained parameters:
    without dropout, stochastic depth and patch dropout, whose noise no weight could adapt to. Dropout of other locked
    blocks remains as configured. Raises ConfigError for a lock that does not fit the tower.
    """
    for side, tower in (("image", spec.image), ("text", spec.text)):
        if tower.lora.rank:
            _freeze_tower(model, side, "0", True, f"model.{side}.lora.rank={tower.lora.rank}")
        elif tower.lock != "none":
            _freeze_tower(model, side, tower.lock, tower.lock_norms, f"model.{side}.lock={tower.lock}")
            model.keep_in_evaluation(_without_trained(model, side))


def _without_trained(model: CLIP, side: str) -> list[str]:
    """Returns the tower, or its trunk, if it has parameters and none of them is trained."""
    for name in (side, *(("image.trunk",) if side == "image" else ())):
        parameters = list(model.get_submodule(name).parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            require_effect(
                side == "text" or not model.image.varying.patch_dropout,
                "patch dropout",
                f"with model.image.lock={model.spec.image.lock}, which keeps the trunk in evaluation mode",
                "remove patch_dropout, or train some of its blocks",
            )
            return [name]
    return []


def _freeze_tower(model: CLIP, side: str, lock: str, lock_norms: bool, key: str) -> None:
    """Freezes the parameters of a tower. `key`: the option that asks for it, as KEY=VALUE."""
    parameters = {name: p for name, p in model.named_parameters() if name.startswith(f"{side}.")}
    all_layers = lock in ("all", "norms")
    frozen = set(parameters) if all_layers else _below(model, side, int(lock), key)
    norms = {
        name: owned
        for name, module in model.named_modules()
        if isinstance(module, NORMS)
        and name.startswith(f"{side}.")
        and (owned := {f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)}) <= frozen
        and (owned or all_layers)
    }
    of_norms = set().union(*norms.values())
    if lock == "norms":
        frozen = of_norms
    if lock_norms:
        model.keep_in_evaluation(name for name in norms if isinstance(model.get_submodule(name), BATCH_NORM))
    else:
        require_effect(bool(norms), f"model.{side}.lock_norms=false", f"with {key}, which locks no norm")
        frozen -= of_norms
    for name in frozen:
        parameters[name].requires_grad_(False)


def _below(model: CLIP, side: str, trained: int, key: str) -> set[str]:
    """Returns the names of the parameters below the `trained` highest blocks of a tower."""
    from clipx.model.layers import parameter_layers

    depths = {name: depth for name, depth in parameter_layers(model, key).items() if name.startswith(f"{side}.")}
    blocks = max(top for _, top in depths.values()) - 1
    require(
        trained <= blocks,
        f"{key} is more than the {blocks} blocks of the tower: give at most {blocks}, or none",
    )
    return {name for name, (layer, top) in depths.items() if top - layer > trained}
