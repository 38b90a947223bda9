"""Learned positions of weights, fitted to another image size, or to a longer context (Long-CLIP, arXiv:2403.15378)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from clipx.errors import CheckpointError, ConfigError, require_effect
from clipx.model.clip import CLIP
from clipx.model.spec import ModelSpec

_NAME = "text.positional_embedding"


def stretch_text_positions(
    tensors: Mapping[str, Tensor], keep: int, length: int, location: str
) -> tuple[Mapping[str, Tensor], str]:
    """Stretches the text positions of weights to `length`, model.text.context_length, and keeps the first `keep`.

    Returns (tensors, a note for the log). `location`: that of the weights. Raises ConfigError if they have not fewer
    positions, and CheckpointError if they have none.
    """
    if _NAME not in tensors:
        raise CheckpointError(f"{location} has no {_NAME} for model.text.stretch_keep={keep}: give other weights")
    found, option = len(tensors[_NAME]), f"model.text.stretch_keep={keep}"
    positions = f"on {location}, which has {found} text positions, model.text.context_length={length}"
    require_effect(found < length, option, positions, f"remove it, or give model.text.context_length above {found}")
    if keep > found - 2:
        raise ConfigError(
            f"{option} leaves less than 2 of the {found} text positions of {location} to interpolate: give at most "
            f"{found - 2}; the reference is 20"
        )
    note = f"{_NAME} was stretched from {found} to {length} positions, the first {keep} unchanged"
    return {**tensors, _NAME: stretched(tensors[_NAME], keep, length)}, note


def stretched(rows_LW: Tensor, keep: int, length: int) -> Tensor:
    """Returns `length` rows: the first `keep`, then the others interpolated linearly, [L, W] -> [length, W].

    The j-th row after the kept ones is at j/λ of the others, λ = (length - keep) / (L - keep). Rows beyond the last of
    the others continue the line through the last two, as in Long-CLIP.
    """
    tail = rows_LW[keep:].to(torch.float64)
    place = torch.arange(length - keep, dtype=torch.float64, device=tail.device) * (len(tail) / (length - keep))
    low = place.floor().clamp(max=len(tail) - 2).long()
    rest = tail[low] + (place - low)[:, None] * (tail[low + 1] - tail[low])
    return torch.cat([rows_LW[:keep], rest.to(rows_LW.dtype)])


def with_context(spec: ModelSpec, length: int) -> ModelSpec:
    """Returns the configuration of weights with the context length of the model to which they are stretched."""
    return replace(spec, text=replace(spec.text, context_length=length))


def fit_positions(model: CLIP, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], list[str]]:
    """Interpolates the image tower's positional embeddings to the model's grid of patches. Returns (tensors, notes)."""
    expected = model.state_dict()
    if model.image.most_tokens is not None:  # interpolates its positions to every grid of patches
        return tensors, []
    names = [f"image.{name}" for name in model.image.positional_embeddings()]
    other: dict[str, Tensor] = {}
    notes = []
    for name in names:
        wanted, found = expected[name].shape[-2], tensors[name].shape[-2] if name in tensors else None
        if found is None or found == wanted:
            continue
        sides = [(math.isqrt(wanted - extra), math.isqrt(found - extra), extra) for extra in (0, 1)]
        grid = next(((new, old, e) for new, old, e in sides if new**2 + e == wanted and old**2 + e == found), None)
        if grid is None:  # not square: unchanged, and rejected by its shape later
            continue
        other[name] = _resampled(tensors[name], *grid).view(expected[name].shape)
        notes.append(f"{name} was interpolated from {grid[1]}x{grid[1]} positions to {grid[0]}x{grid[0]}")
    return ({**tensors, **other} if other else tensors), notes


def _resampled(embedding: Tensor, new: int, old: int, extra: int) -> Tensor:
    """[..., extra + old², W] -> [1, extra + new², W]."""
    rows = embedding.reshape(1, *embedding.shape[-2:])
    found: Tensor = resample_abs_pos_embed(rows, [new, new], [old, old], num_prefix_tokens=extra)
    return found
