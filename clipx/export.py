"""`python -m clipx.export run=outputs/… format=open_clip out=…`: exports weights for other libraries."""

from __future__ import annotations

from pathlib import Path

from clipx.cli import cli, imports
from clipx.command_spec import UNUSED, WeightsModelSpec
from clipx.config.registry import MISSING, frozen, option, register
from clipx.config.suggestions import did_you_mean
from clipx.errors import CheckpointError, ConfigError, require
from clipx.storage.files import is_local
from clipx.trainer.saved_run import SavedRun, check_only_of_runs, find_run
from clipx.weights.formats import WeightsFormat, writers
from clipx.weights.spec import WeightsChoice


def _check_format(key: str, name: str) -> None:
    require(
        name in writers(),
        f"{key}={name} is not a format that is written: choose one of {', '.join(writers())}"
        f"{did_you_mean(name, list(writers()))}",
    )


@register("")
@frozen
class ExportSpec(WeightsModelSpec):
    """Options of clipx.export."""

    kind: str = "export"
    """Name of this command's options. The key itself cannot be set."""

    run: str = MISSING
    """Weights to export: a run directory or one of its checkpoints, each a path or a URL; or any other value of
    model.weights."""

    step: int | None = None
    """Checkpoint of the run, by its number of steps. null: the newest one. Only for runs."""

    weights: WeightsChoice = WeightsChoice.auto
    """Weights of the checkpoint: `auto` (the moving average if the run has one), `trained` or `average` (the moving
    average). format=open_clip_checkpoint exports the trained weights, to which the optimizer's moments belong. Only for
    runs."""

    format: str = option("open_clip", check=_check_format)
    """Format of the output, one of these or of a plug-in. `open_clip`: a folder for
    open_clip.create_model_and_transforms("local-dir:FOLDER"). `hf`: a folder for transformers'
    CLIPModel.from_pretrained. `safetensors`: a file with clipx's parameter names and the model's configuration.
    `open_clip_checkpoint`: a .pt file from which open_clip's trainer resumes, of a run only."""

    out: str | None = None
    """Path of the output. A folder, or a file: *.safetensors for format=safetensors, *.pt for
    format=open_clip_checkpoint. It must not exist, or be an empty folder. null: in exports/ of the run directory, the
    folder of the format or model.*; required for other weights and for a run at a URL."""

    def __post_init__(self) -> None:
        WeightsModelSpec.__post_init__(self)
        suffix = self.writer.suffix
        require(
            self.out is None or self.out.endswith(suffix),
            f"out={self.out} must be a file name with format={self.format}: give one that ends in {suffix}",
        )
        require(
            not self.writer.of_run or self.weights is not WeightsChoice.average,
            f"weights=average has no optimizer moments, which format={self.format} needs: choose weights=trained",
        )

    @property
    def writer(self) -> WeightsFormat:
        """The chosen format."""
        return writers()[self.format]


def check(spec: ExportSpec) -> SavedRun | None:
    """Returns the run, None for other weights. Raises ClipxError for an export that is not possible."""
    run = find_run(spec.run)
    if run is not None:
        run.the_step(spec.step)
    _check_effect(spec, run)
    out = _output(spec, run)
    if out.exists() and (spec.writer.suffix or not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"out={out} exists already: give another name, or remove it")
    return run


def _output(spec: ExportSpec, run: SavedRun | None) -> Path:
    if spec.out is not None:
        return Path(spec.out)
    if run is None or not is_local(run.location):
        raise ConfigError(f"out has no value, and run={spec.run} is no run on this machine: give a path")
    suffix = spec.writer.suffix
    return run.folder / "exports" / (f"model{suffix}" if suffix else spec.format)


def export(spec: ExportSpec) -> None:
    """Writes the weights and prints how to load them. Raises ClipxError."""
    run = check(spec)  # before torch is loaded
    out = _output(spec, run)
    with imports():
        from clipx.report.console import Screen
        from clipx.weights.export import Exported, write_export
        from clipx.weights.load import weights_part

    if run is None:
        what, exported = spec.run, Exported.of_weights(spec.run, spec)
    else:
        checkpoint = run.load(run.the_step(spec.step))
        if checkpoint is None:
            raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
        choice = WeightsChoice.trained if spec.writer.of_run else spec.weights
        prefix = weights_part(checkpoint, choice, spec.run)
        which = ", the moving average of its weights," if prefix == "average" else ""
        what, exported = f"{spec.run}, step {checkpoint.step:,}{which}", Exported.of_run(run.spec, checkpoint, prefix)
    screen = Screen(True)
    for note in write_export(spec.writer, out, exported):
        screen.print(f"note     {note}")
    screen.print(f"written  {what} to {out}: {spec.writer.usage.format(out=out)}")


def _check_effect(spec: ExportSpec, run: SavedRun | None) -> None:
    """Raises ConfigError for options that do not apply to this kind of weights."""
    if run is not None:
        spec.check_unused(f"run={spec.run}")
        return
    check_only_of_runs(spec.run, step=spec.step, weights=spec.weights)
    require(
        not spec.writer.of_run,
        f"format={spec.format} needs the optimizer's state of a run, and run={spec.run} is not a run of clipx: "
        "give a run, or choose format=open_clip",
    )


main = cli(export, "export", unused=UNUSED, check=check)

if __name__ == "__main__":
    main()
