"""Conversion of tensor names and configurations between clipx and open_clip (according to the code of 3.3.0).

Native layout, also that of OpenAI's weights: visual.* for open_clip's ViT or OpenAI's ResNet, and names without prefix
for the text tower. A tower from timm has visual.trunk.*, and its projection visual.head.proj.*. With `custom_text` in
the configuration, the names of the text tower begin with text.
"""

from __future__ import annotations

import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipx.config.registry import kinds
from clipx.errors import CheckpointError, ClipxError, ConfigError
from clipx.model.spec import ModelSpec
from clipx.weights import clip_config, clip_layout
from clipx.weights.key_mapping import Rule, Tie, check_names, tied

NOT_IN_MODEL = ("logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size")
"""Tensors of a file that clipx's model does not have: the objective has the temperature and bias, and the other three
are constants of OpenAI's files."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Conversions of one kind of model."""

    rules: Callable[[Any, Iterable[str] | None], list[Rule]]  # arguments: spec, names in a file; see `ties`
    config_of: Callable[[Any], dict[str, Any]]
    spec_of: Callable[[dict[str, Any], str], ModelSpec]
    recognizes: Callable[[Mapping[str, Any]], bool] = lambda model: True  # argument: model_cfg
    order: Sequence[str] = ()  # see open_clip_checkpoint.in_their_order


CLIP = Layout(clip_layout.rules, clip_config.config_of, clip_config.spec_of)


def layout_of(spec: ModelSpec) -> Layout:
    """Returns the layout of a model. Raises CheckpointError for a model that open_clip does not have."""
    layout = _own_layout(type(spec))
    if layout is None:
        raise CheckpointError(f"open_clip has no layout for model.kind={spec.kind}: export it with format=safetensors")
    if spec.image.head_blocks:
        raise CheckpointError(
            f"open_clip has no tower for model.image.head_blocks={spec.image.head_blocks}: use format=safetensors, or "
            "weights of a run"
        )
    if not spec.image.kind.squares:
        raise CheckpointError(
            f"open_clip has no tower for {spec.image.kind.option}: use format=safetensors, or weights of a run"
        )
    return layout


def _own_layout(kind: type[ModelSpec]) -> Layout | None:
    """Returns the layout that a kind of model names. Its subclasses have further parts, and so no layout by it."""
    place = vars(kind).get("open_clip_layout")
    return None if place is None else typing.cast(Layout, pkgutil.resolve_name(place))


def _layout_for(model: Mapping[str, Any]) -> Layout:
    """Returns the layout of a configuration: that of a kind of model that recognizes it, else CLIP's."""
    known = [layout for kind in kinds("model").values() if (layout := _own_layout(kind)) not in (None, CLIP)]
    return next((layout for layout in known if layout is not None and layout.recognizes(model)), CLIP)


def ties(spec: ModelSpec, ours: Iterable[str], theirs: Iterable[str] | None = None) -> list[Tie]:
    """Returns open_clip's names of `ours`, names from a model's state_dict.

    `theirs`: names in the file to read, which select one of several layouts. None: the layout that open_clip builds
    from `config_of(spec)`. Raises CheckpointError for a tensor without a name in open_clip.
    """
    return list(tied(layout_of(spec).rules(spec, theirs), ours))


def to_open_clip(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts a model's state_dict to open_clip's names. The temperature is not part of it: the objective has it."""
    return {tie.theirs: tie.to_theirs(tensors[tie.ours]) for tie in ties(spec, tensors)}


def from_open_clip(spec: ModelSpec, tensors: Mapping[str, Tensor], what: str = "the weights") -> dict[str, Tensor]:
    """Converts a state_dict of open_clip or OpenAI to clipx's names, without `NOT_IN_MODEL`. Does not compare shapes.

    Raises CheckpointError for missing and unexpected tensors, by their names in `tensors`.
    """
    found = ties(spec, spec.build(torch.device("meta"), torch.float32).state_dict(), tensors)
    wanted, own = {tie.theirs for tie in found}, tensors.keys() - set(NOT_IN_MODEL)
    check_names(wanted, own, f"{what} do not fit model {spec.name}", "choose the model of these weights")
    return {tie.ours: tie.read(tensors) for tie in found}


def is_clip(tensors: Iterable[str]) -> bool:
    """Returns whether these are names of a CLIP model in a layout of open_clip."""
    return any(name.startswith("visual.") for name in tensors)


def tower_from_open_clip(spec: ModelSpec, tower: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts one tower of a state_dict of open_clip or OpenAI to clipx's names, below and with its projection.

    Tensors that the file does not have are missing in the result, and those without counterpart have its names.
    """
    whole = spec.build(torch.device("meta"), torch.float32).state_dict()
    own = ties(spec, [name for name in whole if name.startswith(f"{tower}.")], tensors)
    found = {tie.ours: tie.to_ours(tensors[tie.theirs]) for tie in own if tie.theirs in tensors}
    known = {tie.theirs for tie in own} | set(NOT_IN_MODEL)
    further = {name for name in tensors if is_clip([name]) == (tower == "image")} - known
    return found | {f"{tower}.{name}": tensors[name] for name in further}


def temperature_of(
    tensors: Mapping[str, Tensor], scale: str = "logit_scale", bias: str = "logit_bias"
) -> tuple[float | None, float | None]:
    """Returns (log α, β) by their names among tensors. None for a missing one. Raises CheckpointError for others than
    one number each."""
    log_scale, beta = (_number(tensors, name) for name in (scale, bias))
    return log_scale, beta


def _number(tensors: Mapping[str, Tensor], name: str) -> float | None:
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.numel() != 1 or not tensor.is_floating_point() or not tensor.isfinite().all():
        raise CheckpointError(
            f"{name} of the weights has shape {list(tensor.shape)} and type {tensor.dtype}, not one finite number in "
            "floating point: give weights with a single temperature, or remove it from the file"
        )
    return tensor.item()


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Returns open_clip's `model_cfg`, as in its model_configs/*.json.

    Raises CheckpointError for a model that open_clip's configuration cannot express.
    """
    return layout_of(spec).config_of(spec)


def spec_of(config: dict[str, Any], name: str) -> ModelSpec:
    """Returns the spec of a model from open_clip's configuration.

    `config`: the content of open_clip_config.json (`model_cfg` with or without `preprocess_cfg`), or `model_cfg` alone,
    as in open_clip's model_configs. Raises CheckpointError naming a key without counterpart in clipx.
    """
    try:
        return _layout_for(config.get("model_cfg", config)).spec_of(config, name)
    except ConfigError as error:  # values out of range
        raise CheckpointError(f"the configuration of {name} describes no model of clipx: {error}") from None
    except ClipxError:
        raise
    except Exception as error:  # values of wrong types, of which timm makes errors of many types
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"the configuration of {name} is not a configuration of open_clip ({reason}): restore it"
        ) from None
