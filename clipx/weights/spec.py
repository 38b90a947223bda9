"""Choices of the commands that read and write weights."""

from __future__ import annotations

from enum import StrEnum

ALL_STEPS = "all"  # as a step of a run: each checkpoint


class WeightsChoice(StrEnum):
    """Which weights of a run's checkpoint."""

    auto = "auto"  # the moving average where the run kept one, as it evaluates itself
    trained = "trained"
    average = "average"


class ExportFormat(StrEnum):
    open_clip = "open_clip"  # a folder for open_clip.create_model_and_transforms("local-dir:FOLDER")
    hf = "hf"  # a folder for transformers' CLIPModel.from_pretrained
    safetensors = "safetensors"  # a file with clipx's own names and the model's configuration
    open_clip_checkpoint = "open_clip_checkpoint"  # a .pt file from which open_clip's trainer goes on

    @property
    def suffix(self) -> str:
        """Of the formats that are one file; empty for a folder."""
        return {"safetensors": ".safetensors", "open_clip_checkpoint": ".pt"}.get(self, "")

    def usage(self, out: str) -> str:
        """What to type to load what was written."""
        return {
            ExportFormat.open_clip: f'open_clip.create_model_and_transforms("local-dir:{out}")',
            ExportFormat.hf: f'transformers.CLIPModel.from_pretrained("{out}")',
            ExportFormat.safetensors: f"model.weights={out}",
            ExportFormat.open_clip_checkpoint: f"python -m open_clip_train.main --resume {out}",
        }[self]
