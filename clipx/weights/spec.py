"""Choices of the commands that load and export weights."""

from __future__ import annotations

from enum import StrEnum

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of the files of weights."""

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
