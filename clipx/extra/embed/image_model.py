"""Models with an image tower of timm alone, which embed images."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import AttentionPool2d, RotAttentionPool2d

from clipx.config.names import name_of
from clipx.config.options import check_options
from clipx.errors import CheckpointError, require
from clipx.model.clip import CLIP, SkipDraws
from clipx.model.spec import ClipSpec
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tower_spec import ImageTowerSpec, Interpolation, Projection
from clipx.weights.download import errors_of
from clipx.weights.load import LoadedWeights
from clipx.weights.timm_filter import TimmFilter
from clipx.weights.tower import ADAPTED, load_towers
from clipx.weights.tower_source import TimmWeights, find_timm


def load_image_model(
    location: str, key: str, size: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[LoadedWeights, ClipSpec, CLIP] | None:
    """Builds a model in evaluation mode whose image tower is a timm model without classifier. Its embedding is that
    tower's pooled features; its text tower is a placeholder.

    `key`: the option that names the location. `size`: side of the images; None: that of the weights. Returns None for a
    location without a model that timm describes. Raises ClipxError.
    """
    with errors_of(key):
        source = find_timm(location)
    if source is None:
        return None
    with errors_of(key, "model.image.weights"):
        spec = _spec(source, size)
        with SkipDraws():
            model = spec.build(device, dtype)
        load_towers(model, spec)
    model.eval().requires_grad_(False)
    return LoadedWeights(location, model.image.state_dict(), spec), spec, model


def _spec(source: TimmWeights, size: int | None) -> ClipSpec:
    if source.architecture is None or not {"mean", "std", "input_size"} <= source.input.keys():
        raise CheckpointError(f"{source.location} does not describe its images: give timm:NAME.TAG")
    interpolation = source.input.get("interpolation")
    image = ImageTowerSpec(
        timm=source.architecture,
        weights=source.location,
        size=size or int(source.input["input_size"][-1]),
        options={name: value for name, value in source.options.items() if name not in ADAPTED},
        mean=list(map(float, source.input["mean"])),
        std=list(map(float, source.input["std"])),
        interpolation=Interpolation.bilinear if interpolation == "bilinear" else Interpolation.bicubic,
        projection=Projection.none,
    )
    check_options(image, "model.image.")  # before it is built, for its width
    text = ClipTextSpec(width=8, heads=1, layers=1)  # never computed, but a model has two towers
    return ClipSpec(name=name_of(source.architecture), embed_dim=_width(image), image=image, text=text)


def _width(spec: ImageTowerSpec) -> int:
    """Returns the number of pooled features of a trunk."""
    trunk: Any = TimmFilter.record(spec).model
    require(
        not any(isinstance(module, AttentionPool2d | RotAttentionPool2d) for module in trunk.children()),
        f"{spec.weights} pools by an attention that projects to an embedding: give the CLIP model of these weights",
    )
    width: int = trunk.head_hidden_size
    return width
