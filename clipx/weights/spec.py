"""Choices of the commands that load and export weights."""

from __future__ import annotations

import os
from enum import StrEnum

from clipx.errors import CheckpointError
from clipx.model.tower_spec import timm_weights_of
from clipx.storage.files import is_local, local_path
from clipx.storage.hub import HUB

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of the files of weights."""

CONFIG = "open_clip_config.json"
"""File of a folder of open_clip's weights with the configuration of the model."""

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


class ExportFormat(StrEnum):
    """Format of exported weights."""

    open_clip = "open_clip"
    """A folder for open_clip.create_model_and_transforms("local-dir:FOLDER")."""

    hf = "hf"
    """A folder for CLIPModel.from_pretrained of transformers."""

    safetensors = "safetensors"
    """A safetensors file with clipx's tensor names and the model's configuration."""

    open_clip_checkpoint = "open_clip_checkpoint"
    """A .pt file from which open_clip's trainer resumes."""

    @property
    def suffix(self) -> str:
        """Suffix of the file. Empty for a format that is a folder."""
        return {"safetensors": ".safetensors", "open_clip_checkpoint": ".pt"}.get(self, "")

    def usage(self, out: str) -> str:
        """Returns the code, option or command that loads the export at `out`."""
        return {
            ExportFormat.open_clip: f'open_clip.create_model_and_transforms("local-dir:{out}")',
            ExportFormat.hf: f'transformers.CLIPModel.from_pretrained("{out}")',
            ExportFormat.safetensors: f"model.weights={out}",
            ExportFormat.open_clip_checkpoint: f"python -m open_clip_train.main --resume {out}",
        }[self]


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
