"""Choices of the commands that load and export weights."""

from __future__ import annotations

import os
from enum import StrEnum

from clipx.errors import CheckpointError
from clipx.model.tower_spec import timm_weights_of
from clipx.storage.files import is_local, local_path
from clipx.storage.hub import HUB
from clipx.weights.formats import CONFIG

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of the files of weights."""

LOCAL = "local-dir:"
"""open_clip's prefix of a folder."""

ALL_STEPS = "all"
"""Value of the option `step` that selects every checkpoint of a run."""


class WeightsChoice(StrEnum):
    """Selection of weights from a run's checkpoint."""

    auto = "auto"
    """The moving average if the run has one, else the trained weights. A run evaluates itself with these."""

    trained = "trained"
    """The trained weights."""

    average = "average"
    """The moving average of the weights. Raises an error for a run without one (optimizer.ema_decay=null)."""


def check_exists(location: str, key: str = "model.weights") -> None:
    """Raises CheckpointError for weights at a local path that does not exist. `key`: the option that names them."""
    path = location.removeprefix(LOCAL)
    if path.startswith(HUB) or timm_weights_of(path) is not None or not is_local(path):
        return
    if not os.path.exists(local_path(path)):  # noqa: PTH110  # Path raises an error for a name that is too long
        raise no_weights(location, "does not exist", key)


def no_weights(location: str, found: str, key: str = "model.weights") -> CheckpointError:
    """Returns the error for a location without weights. `found`: what is there instead, as text."""
    return CheckpointError(
        f"{key}={location} {found}: give a run directory, a folder with {CONFIG}, or a file that ends in "
        f"{', '.join(SUFFIXES)}"
    )
