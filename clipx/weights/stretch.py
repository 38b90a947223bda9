"""Stretching of learned text positions to a longer context (Long-CLIP, arXiv:2403.15378)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from clipx.errors import CheckpointError, ConfigError, require_effect
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
