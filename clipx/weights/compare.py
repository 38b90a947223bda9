"""Comparison of the configuration of weights with that of the model to load: it covers what shapes cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from clipx.config.saved import to_dict
from clipx.errors import CheckpointError
from clipx.model.spec import ModelSpec
from clipx.weights.clip_config import TRAINING, last_norm, resnet_form
from clipx.weights.clip_layout import RESNET, VIT, layout_of

_IGNORED = {"name", "weights", "patch_dropout", "patch_dropout_schedule", "patch_dropout_end", "patch_dropout_final"}
_TRAINED = {
    "checkpointing",
    "packed",
    "lock",
    "lock_norms",
    "stretch_keep",
    "lora",
    "weights",
    "head_drop_path",
    "head_weights",
}
"""Options that affect how a model or tower is initialized, trained or computed, but not its function."""
_OF_BOTH = {"projection", "projection_bias", "head_blocks", "mean", "std", "interpolation", "stretch"}
"""Options above a tower, which may differ if it is loaded alone, and of its input, which tower.py compares."""
_ARCHITECTURE = {"timm", "options"}  # compared by the trunk
_SHOWN = 5


def check_same(ours: ModelSpec, theirs: ModelSpec, place: str) -> None:
    """Raises CheckpointError if the configuration of weights (`theirs`) is of another model than `ours`.

    The error has both values of each key. `place`: location of the weights.
    """
    here, there = _values(ours), _values(theirs)
    if _trunk(ours) != _trunk(theirs):  # may still be two names of one architecture
        here, there = here | _flat("model.image", _form(ours)), there | _flat("model.image", _form(theirs))
    _require_equal(here, there, place)


def check_same_tower(ours: ModelSpec, theirs: ModelSpec, tower: str, place: str) -> None:
    """Raises CheckpointError if one tower of the weights, `image` or `text`, is another one, as `check_same`.

    Not compared are the projection, which depends on both towers, and the input of an image tower: see tower.py.
    """
    here, there = (_tower_values(spec, tower) for spec in (ours, theirs))
    if tower == "image" and (_trunk(ours) != _trunk(theirs) or here["model.quick_gelu"] != there["model.quick_gelu"]):
        forms = [_form(spec) for spec in (ours, theirs)]
        if all("activation" in form for form in forms):  # which quick_gelu need not select
            here, there = ({k: v for k, v in found.items() if k != "model.quick_gelu"} for found in (here, there))
        here, there = here | _flat("model.image", forms[0]), there | _flat("model.image", forms[1])
    _require_equal(here, there, place)


def _tower_values(spec: ModelSpec, tower: str) -> dict[str, Any]:
    """Returns the values that define a tower below its projection, without the image tower's architecture."""
    prefix = f"model.{tower}."
    activation = "model.quick_gelu" if tower == "image" or spec.text.kind == "clip" else None
    return {
        key: value
        for key, value in _values(spec).items()
        if (key.startswith(prefix) and key.removeprefix(prefix) not in _OF_BOTH) or key == activation
    }


def _require_equal(here: Mapping[str, Any], there: Mapping[str, Any], place: str) -> None:
    keys = [key for key in {**here, **there} if not _equal(here.get(key), there.get(key))]
    if not keys:
        return
    differences = [f"{key}={_shown(there.get(key))}, expected {_shown(here.get(key))}" for key in keys[:_SHOWN]]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    raise CheckpointError(
        f"{place} holds weights of another model: {'; '.join(differences)}{more}: choose the model of these weights, "
        "or other weights"
    )


def _values(spec: ModelSpec) -> dict[str, Any]:
    """Returns the values that define a model, by configuration key, without the image tower's architecture."""
    values = to_dict(spec)
    image, text = values.pop("image"), values.pop("text")
    found = _flat("model", {key: value for key, value in values.items() if key not in _IGNORED})
    left_out = {*_ARCHITECTURE, *spec.image.adapts}
    found |= _flat("model.image", {key: value for key, value in image.items() if key not in left_out})
    found |= _flat("model.text", text)
    found["model.text.tokenizer"] = "clip" if text["tokenizer"] == "clip" else "a tokenizer.json"
    return found


def _trunk(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Returns timm's name without the tag of weights, and the options that define the architecture."""
    image = spec.image
    return (image.timm or "").partition(".")[0], {key: v for key, v in image.options.items() if key not in TRAINING}


def _form(spec: ModelSpec) -> dict[str, Any]:
    """Returns the architecture of the image tower, independent of the timm name and options that select it."""
    name, options = _trunk(spec)
    tower = spec.build(torch.device("meta"), torch.float32).image
    form = tower.form() or _native_form(tower.trunk)
    return {"timm": name, "options": options} if form is None else form


def _native_form(trunk: Any) -> dict[str, Any] | None:
    """Returns the architecture of a trunk that open_clip implements itself, whatever its timm name. None for others."""
    rules = layout_of(trunk)
    if rules is RESNET:
        return {**resnet_form(trunk), "heads": trunk.head.num_heads}
    if rules is not VIT:
        return None
    block = trunk.blocks[0]
    return {
        "layers": len(trunk.blocks),
        "width": trunk.embed_dim,
        "heads": block.attn.num_heads,
        "patch_size": trunk.patch_embed.patch_size[0],
        "hidden": block.mlp.fc1.out_features,
        "activation": type(block.mlp.act).__name__,
        "norm_eps": last_norm(trunk).eps,
        "norm_before_blocks": not isinstance(trunk.norm_pre, nn.Identity),
        "pool": trunk.global_pool,
        "norm_after_pool": last_norm(trunk) is trunk.fc_norm,
    }


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in _TRAINED:
            continue
        if isinstance(value, dict):
            flat |= _flat(f"{prefix}.{key}", value)
        else:
            flat[f"{prefix}.{key}"] = value
    return flat


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return abs(a - b) <= 1e-6 * max(1, abs(a))
    return bool(a == b)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
