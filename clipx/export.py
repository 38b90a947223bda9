"""`python -m clipx.export run=outputs/… format=open_clip out=…`: a checkpoint of a run as other libraries read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clipx.checkpoint.format import CheckpointDir
from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.errors import CheckpointError, require
from clipx.run.directory import RunDir
from clipx.trainer.saved_run import load_run
from clipx.weights.spec import ExportFormat, WeightsChoice


@option("")
@dataclass(kw_only=True, slots=True)
class ExportSpec:
    """What to write of which run, and where to."""

    kind: str = "export"
    run: str = MISSING  # a run directory
    step: int | None = None  # of the checkpoint; null: the newest
    weights: WeightsChoice = WeightsChoice.auto  # open_clip_checkpoint: trained, to which its moments belong
    format: ExportFormat = MISSING
    out: str = MISSING  # a folder, or a file .safetensors or .pt; must not be there yet, or be an empty folder

    def __post_init__(self) -> None:
        suffix = ExportFormat(self.format).suffix
        require(
            self.out.endswith(suffix),
            f"out={self.out} is to be one file with format={self.format}: let its name end in {suffix}",
        )
        require(
            self.format is not ExportFormat.open_clip_checkpoint or self.weights is not WeightsChoice.average,
            "weights=average has no optimizer's moments, which format=open_clip_checkpoint is for: choose trained",
        )


def export(spec: ExportSpec) -> None:
    """Writes the checkpoint and prints how to load it. Raises CheckpointError."""
    run = load_run(Path(spec.run))  # before torch is loaded
    out = Path(spec.out)
    if out.exists() and (spec.format.suffix or not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"out={out} is there already: give another name, or remove it")
    from clipx.report.console import Screen
    from clipx.weights.export import write_export
    from clipx.weights.load import weights_part

    checkpoint = CheckpointDir(RunDir(Path(spec.run)).checkpoints, print).load(spec.step)
    if checkpoint is None:
        raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
    choice = WeightsChoice.trained if spec.format is ExportFormat.open_clip_checkpoint else spec.weights
    prefix = weights_part(checkpoint, choice, spec.run)
    screen = Screen(True)
    for note in write_export(spec.format, out, run, checkpoint, prefix):
        screen.print(f"note     {note}")
    which = "the moving average of its weights, " if prefix == "average" else ""
    screen.print(f"written  {spec.run}, step {checkpoint.step:,}, {which}to {out}: {spec.format.usage(spec.out)}")


main = cli(export, "export")

if __name__ == "__main__":
    main()
