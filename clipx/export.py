"""`python -m clipx.export run=outputs/… format=open_clip out=…`: exports a checkpoint of a run for other libraries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clipx.cli import cli, imports
from clipx.config.registry import MISSING, option
from clipx.errors import CheckpointError, require
from clipx.trainer.saved_run import open_run
from clipx.weights.spec import ExportFormat, WeightsChoice


@option("")
@dataclass(kw_only=True, slots=True)
class ExportSpec:
    """Options of clipx.export."""

    kind: str = "export"
    """Name of this command's options. The key itself cannot be set."""

    run: str = MISSING
    """Run: a run directory, or one of its checkpoints; a path or a URL."""

    step: int | None = None
    """Checkpoint of the run, by its number of steps. null: the newest one."""

    weights: WeightsChoice = WeightsChoice.auto
    """Weights of the checkpoint: `auto` (the moving average if the run has one), `trained` or `average` (the moving
    average). format=open_clip_checkpoint exports the trained weights, to which the optimizer's moments belong."""

    format: ExportFormat = MISSING
    """Format of the output. `open_clip`: a folder for
    open_clip.create_model_and_transforms("local-dir:FOLDER"). `hf`: a folder for transformers'
    CLIPModel.from_pretrained. `safetensors`: a file with clipx's parameter names and the model's configuration.
    `open_clip_checkpoint`: a .pt file from which open_clip's trainer resumes."""

    out: str = MISSING
    """Path of the output. A folder, or a file: *.safetensors for format=safetensors, *.pt for
    format=open_clip_checkpoint. It must not exist, or be an empty folder."""

    def __post_init__(self) -> None:
        suffix = ExportFormat(self.format).suffix
        require(
            self.out.endswith(suffix),
            f"out={self.out} must be a file name with format={self.format}: give one that ends in {suffix}",
        )
        require(
            self.format is not ExportFormat.open_clip_checkpoint or self.weights is not WeightsChoice.average,
            "weights=average has no optimizer moments, which format=open_clip_checkpoint needs: choose weights=trained",
        )


def export(spec: ExportSpec) -> None:
    """Writes the checkpoint and prints how to load it. Raises CheckpointError."""
    run = open_run(spec.run)  # before torch is loaded
    step = run.the_step(spec.step)
    out = Path(spec.out)
    if out.exists() and (spec.format.suffix or not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"out={out} exists already: give another name, or remove it")
    with imports():
        from clipx.report.console import Screen
        from clipx.weights.export import write_export
        from clipx.weights.load import weights_part

    checkpoint = run.load(step)
    if checkpoint is None:
        raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
    choice = WeightsChoice.trained if spec.format is ExportFormat.open_clip_checkpoint else spec.weights
    prefix = weights_part(checkpoint, choice, spec.run)
    screen = Screen(True)
    for note in write_export(spec.format, out, run.spec, checkpoint, prefix):
        screen.print(f"note     {note}")
    which = "the moving average of its weights, " if prefix == "average" else ""
    screen.print(f"written  {spec.run}, step {checkpoint.step:,}, {which}to {out}: {spec.format.usage(spec.out)}")


main = cli(export, "export")

if __name__ == "__main__":
    main()
