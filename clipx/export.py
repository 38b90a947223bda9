"""`python -m clipx.export run=outputs/… format=open_clip out=…`: a checkpoint of a run as other libraries read it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.errors import CheckpointError, require
from clipx.objective.fcco import ConstantSpec, IndividualSpec
from clipx.run.load import Weights as Chosen
from clipx.run.load import load_run, part_of

if TYPE_CHECKING:
    from clipx.checkpoint.format import Checkpoint
    from clipx.trainer.spec import RunSpec
    from clipx.weights.load import Weights


class Format(StrEnum):
    open_clip = "open_clip"  # a folder for open_clip.create_model_and_transforms("local-dir:FOLDER")
    hf = "hf"  # a folder for transformers' CLIPModel.from_pretrained
    safetensors = "safetensors"  # a file with clipx's own names and the model's configuration
    open_clip_checkpoint = "open_clip_checkpoint"  # a .pt file from which open_clip's trainer goes on


_ENDINGS = {Format.safetensors: ".safetensors", Format.open_clip_checkpoint: ".pt"}  # of the formats that are one file


@option("")
@dataclass(kw_only=True, slots=True)
class ExportSpec:
    """What to write of which run, and where to."""

    kind: str = "export"
    run: str = MISSING  # a run directory
    step: int | None = None  # of the checkpoint; null: the newest
    weights: Chosen = Chosen.auto  # open_clip_checkpoint has the trained ones, which its moments belong to
    format: Format = MISSING
    out: str = MISSING  # a folder, or a file .safetensors or .pt; must not be there yet, or be an empty folder

    def __post_init__(self) -> None:
        ending = _ENDINGS.get(self.format)
        require(
            ending is None or self.out.endswith(ending),
            f"out={self.out} is to be one file with format={self.format}: let its name end in {ending}",
        )
        require(
            self.format is not Format.open_clip_checkpoint or self.weights is not Chosen.average,
            "weights=average has no optimizer's moments, which format=open_clip_checkpoint is for: choose trained",
        )


def export(spec: ExportSpec) -> None:
    run = load_run(Path(spec.run))  # before torch is loaded
    out = Path(spec.out)
    if out.exists() and not (spec.format not in _ENDINGS and out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"out={out} is there already: give another name, or remove it")
    from clipx.checkpoint.format import CheckpointDir
    from clipx.report.console import Screen
    from clipx.run.directory import RunDir

    found = CheckpointDir(RunDir(Path(spec.run)).checkpoints, print).load(spec.step)
    if found is None:
        raise CheckpointError(f"run={spec.run} has no checkpoint yet: train it first")
    wanted = Chosen.trained if spec.format is Format.open_clip_checkpoint else spec.weights
    chosen = part_of(found, wanted, spec.run)
    weights, notes = _weights(spec, run, found, chosen)
    with _whole(out) as place:
        notes += _WRITERS[spec.format](place, weights, run, found)
    which = "the moving average of its weights, " if chosen == "average" else ""
    screen = Screen(True)
    for note in notes:
        screen.print(f"note     {note}")
    screen.print(f"written  {spec.run}, step {found.step:,}, {which}to {out}: {_usage(spec.format, out)}")


def _weights(spec: ExportSpec, run: RunSpec, found: Checkpoint, chosen: str) -> tuple[Weights, list[str]]:
    """The weights with the temperature that belongs to them, and what should be known of it."""
    from clipx.checkpoint.state import select_prefix
    from clipx.weights.load import Weights, learned

    log_scale, bias = learned(found)
    notes: list[str] = []
    if log_scale is None:
        tau, told = _temperature(run)
        notes = [f"logit_scale is {1 / tau:.4g}: {told}"]
        log_scale = -math.log(tau)
    tensors = dict(select_prefix(chosen, found.tensors))
    return Weights(spec.run, tensors, run.model, log_scale, bias), notes


def _temperature(run: RunSpec) -> tuple[float, str]:
    """τ of an objective that has not learned one for all pairs, and where it is from."""
    match run.objective:
        case ConstantSpec(temperature=tau):
            return tau, f"the constant temperature {tau:g} of objective={run.objective.kind}"
        case IndividualSpec(init_temperature=tau):
            return tau, f"objective={run.objective.kind} has a temperature for each sample, which began at {tau:g}"
        case _:
            return 0.07, f"objective={run.objective.kind} has no temperature, and 0.07 is where CLIP's begins"


# ------------------------------------------------------------------------------------------------- the formats


def _open_clip(folder: Path, weights: Weights, run: RunSpec, found: Checkpoint) -> list[str]:
    from safetensors.torch import save_file

    from clipx.weights.open_clip import config_of
    from clipx.weights.open_clip_checkpoint import state_dict

    image = run.model.image
    model = config_of(run.model)
    if weights.bias is not None:
        model["init_logit_bias"] = weights.bias  # without it open_clip's model has none
    # The resize and crop of clipx's evaluation; the size comes from the model.
    mode = "squash" if image.stretch else "shortest"
    preprocess = {"mean": image.mean, "std": image.std, "interpolation": "bicubic", "resize_mode": mode}
    folder.mkdir()
    if run.model.text.tokenizer != "clip":
        _copy_tokenizer(run.model.text.tokenizer, folder)
        model["text_cfg"]["hf_tokenizer_name"] = "tokenizer.json"  # any name: it looks in the folder
    config = json.dumps({"model_cfg": model, "preprocess_cfg": preprocess}, indent=1)
    (folder / "open_clip_config.json").write_text(config + "\n", encoding="utf-8")
    save_file(state_dict(weights), folder / "open_clip_model.safetensors", {"format": "pt"})
    return []


def _copy_tokenizer(place: str, folder: Path) -> None:
    """Into the folder, where transformers' AutoTokenizer finds it."""
    from clipx.model.hf_tokenizer import tokenizer_files

    for name, path in tokenizer_files(place).items():
        if path.is_file():
            shutil.copyfile(path, folder / name)
    config = folder / "tokenizer_config.json"
    if not config.exists():
        config.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")


def _hf(folder: Path, weights: Weights, run: RunSpec, found: Checkpoint) -> list[str]:
    from clipx.weights.huggingface import write

    return write(folder, weights)


def _safetensors(file: Path, weights: Weights, run: RunSpec, found: Checkpoint) -> list[str]:
    from clipx.weights.load import write

    write(file, weights, found.step)
    return []


def _open_clip_checkpoint(file: Path, weights: Weights, run: RunSpec, found: Checkpoint) -> list[str]:
    from clipx.weights.open_clip_checkpoint import write

    return write(file, weights, run.name, run.optimizer, found)


_WRITERS: dict[Format, Callable[[Path, Weights, RunSpec, Checkpoint], list[str]]] = {
    Format.open_clip: _open_clip,
    Format.hf: _hf,
    Format.safetensors: _safetensors,
    Format.open_clip_checkpoint: _open_clip_checkpoint,
}
"""Each writes to a place where nothing is, and returns what the user should know of what was written."""


def _usage(format: Format, out: Path) -> str:
    """What to type to load what was written."""
    return {
        Format.open_clip: f'open_clip.create_model_and_transforms("local-dir:{out}")',
        Format.hf: f'transformers.CLIPModel.from_pretrained("{out}")',
        Format.safetensors: f"model.weights={out}",
        Format.open_clip_checkpoint: f"python -m open_clip_train.main --resume {out}",
    }[format]


# ------------------------------------------------------------------------------------------------------ files


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A place beside `out` to write to, which becomes `out` at the end: it is whole or not there.

    Raises CheckpointError where it cannot be written.
    """
    place = out.with_name(f".{out.name}.{uuid4().hex[:12]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield place
        place.rename(out)
    except OSError as error:
        raise CheckpointError(f"out={out} cannot be written ({error.strerror or error}): give another") from error
    finally:
        if place.is_dir():
            shutil.rmtree(place)
        elif place.exists():
            place.unlink()


main = cli(export, "export")

if __name__ == "__main__":
    main()
