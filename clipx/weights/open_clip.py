"""What open_clip calls the tensors and the configuration of a model (read in its code at 3.3.0), and back.

Native layout: visual.* of its own ViT or of OpenAI's ResNet, and the text tower's names at the top, as OpenAI's
weights have them too. A tower from timm is visual.trunk.*, its projection visual.head.proj.*; with `custom_text` in
the configuration the text tower's names begin with text. instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipx.errors import CheckpointError
from clipx.model.spec import ClipSpec, CoCaSpec, ModelSpec
from clipx.weights import clip_config, clip_layout, coca
from clipx.weights.key_mapping import Rule, Tie, tied

NOT_IN_MODEL = ("logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size")
"""Tensors of a file that are not the model's here: the objective has the temperature; three are numbers of OpenAI's."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One kind of model as open_clip has it."""

    rules: Callable[[Any, Iterable[str] | None], list[Rule]]  # of (the model's spec, the names in a file): see `ties`
    config_of: Callable[[Any], dict[str, Any]]
    spec_of: Callable[[dict[str, Any], str], ModelSpec]


LAYOUTS: dict[type[ModelSpec], Layout] = {
    ClipSpec: Layout(clip_layout.rules, clip_config.config_of, clip_config.spec_of),
    CoCaSpec: Layout(coca.rules, coca.config_of, coca.spec_of),
}


def _layout_of(spec: ModelSpec) -> Layout:
    if type(spec) not in LAYOUTS:
        raise CheckpointError(f"open_clip has no layout for model.kind={spec.kind}: export it with format=safetensors")
    return LAYOUTS[type(spec)]


def ties(spec: ModelSpec, ours: Iterable[str], theirs: Iterable[str] | None = None) -> list[Tie]:
    """The names there of `ours`, which are among a model's state_dict's. `theirs`: the names in a file that is read, by
    which one layout of several is chosen; without them it is the one that open_clip makes of `config_of(spec)`.

    Raises CheckpointError where open_clip has no name for one.
    """
    return list(tied(_layout_of(spec).rules(spec, theirs), ours))


def to_open_clip(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's state_dict under open_clip's names; without the temperature, which the objective has."""
    return {tie.theirs: tie.to_theirs(tensors[tie.ours]) for tie in ties(spec, tensors)}


def from_open_clip(spec: ModelSpec, tensors: Mapping[str, Tensor], what: str = "the weights") -> dict[str, Tensor]:
    """The model's state_dict from open_clip's, or OpenAI's, without what is `NOT_IN_MODEL`. Shapes are not compared.

    Raises CheckpointError naming what is missing or left over, by the names in `tensors`.
    """
    found = ties(spec, spec.build(torch.device("meta"), torch.float32).state_dict(), tensors)
    wanted = {tie.theirs for tie in found}
    missing, extra = sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted - set(NOT_IN_MODEL))
    if missing or extra:
        raise CheckpointError(
            f"{what} do not fit model {spec.name}: missing {_some(missing)}; left over {_some(extra)}; choose the "
            "model that they are of"
        )
    return {tie.ours: tie.to_ours(tensors[tie.theirs]) for tie in found}


def temperature_of(
    tensors: Mapping[str, Tensor], scale: str = "logit_scale", bias: str = "logit_bias"
) -> tuple[float | None, float | None]:
    """(log α, β) by their names among tensors; None for what is not there."""
    log_scale, beta = tensors.get(scale), tensors.get(bias)
    return None if log_scale is None else log_scale.item(), None if beta is None else beta.item()


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """open_clip's `model_cfg`, as in its model_configs/*.json.

    Raises CheckpointError where it has no words for a model of this kind.
    """
    return _layout_of(spec).config_of(spec)


def spec_of(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec of a model from an open_clip_config.json, `model_cfg` with or without `preprocess_cfg`; or from
    `model_cfg` alone, as in open_clip's model_configs.

    Raises CheckpointError naming what in it has no words here.
    """
    try:
        spec_class = CoCaSpec if "multimodal_cfg" in config.get("model_cfg", config) else ClipSpec
        return LAYOUTS[spec_class].spec_of(config, name)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:  # of values of other types
        raise CheckpointError(f"the configuration of {name} is not open_clip's ({error}): restore it") from None


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
