"""Weights that somebody has trained: found by a path or a URL, given under clipx's own names.

find(place) -> Weights(model, spec, scale, bias)          load(model, weights)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from clipx.checkpoint.folder import CheckpointDir
from clipx.checkpoint.state import load_module, part
from clipx.config import option_from_dict
from clipx.errors import CheckpointError
from clipx.model import ModelSpec
from clipx.model.clip import CLIP
from clipx.resume import CHECKPOINTS


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model by the names of its state_dict, and what is known of them."""

    place: str  # as the user gave it
    model: Mapping[str, torch.Tensor]
    spec: ModelSpec | None  # the configuration that came with them
    log_scale: float | None = None  # of the inverse temperature α they were trained with, at its end
    bias: float | None = None  # of a sigmoid loss


def find(place: str) -> Weights:
    """The weights at `place`: a run directory (its newest checkpoint; the moving average where one was kept).

    Raises CheckpointError where there are none.
    """
    found = CheckpointDir(Path(place) / CHECKPOINTS, print).load()
    if found is None:
        raise CheckpointError(f"{place} holds no checkpoint: check the path")
    spec: ModelSpec = option_from_dict("model", found.state["config"]["model"])
    tensors = part("average", found.tensors) or part("model", found.tensors)
    objective = part("objective", found.tensors)
    scale = objective.get("temperature.log_scale")
    return Weights(place, tensors, spec, None if scale is None else scale.item())


def load(model: CLIP, weights: Weights) -> list[str]:
    """Fills the model, strictly. Returns what was changed on the way, for the log. Raises CheckpointError."""
    load_module(model, weights.model, f"{weights.place}'s model")
    return []
