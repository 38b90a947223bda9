"""Export of a checkpoint of a run, or of other weights, to the formats of other libraries."""

from __future__ import annotations

import json
import math
import pkgutil
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from safetensors.torch import save_file

from clipx.checkpoint.format import Checkpoint
from clipx.checkpoint.state import select_prefix
from clipx.errors import CheckpointError, disk_failure
from clipx.escape import announce
from clipx.model.hf_tokenizer import read_tokenizer, tokenizer_files
from clipx.model.lora import merged, without_adapters
from clipx.model.text_spec import TextTowerSpec
from clipx.weights import open_clip_checkpoint
from clipx.weights.formats import CONFIG, TOKENIZER, WeightsFormat
from clipx.weights.load import LoadedWeights, learned_temperature, load_model, save_weights
from clipx.weights.open_clip import config_of

if TYPE_CHECKING:
    from clipx.command_spec import WeightsModelSpec
    from clipx.trainer.spec import RunSpec

_CLIPS_LOG_SCALE = math.log(1 / 0.07)


@dataclass(frozen=True, slots=True)
class Exported:
    """Weights to export, with the checkpoint and the run that they are of, if any, and notes for the user."""

    weights: LoadedWeights
    run: RunSpec | None = None
    checkpoint: Checkpoint | None = None
    notes: Sequence[str] = ()

    @classmethod
    def of_run(cls, run: RunSpec, checkpoint: Checkpoint, prefix: str) -> Exported:
        """`prefix`: prefix of the exported weights in the checkpoint."""
        log_scale, bias = learned_temperature(checkpoint)
        notes: list[str] = []
        if log_scale is None:
            tau, origin = run.objective.fixed_temperature()
            notes = [f"logit_scale is {1 / tau:.4g}: {origin}"]
            log_scale = -math.log(tau)
        place = str(checkpoint.folder)
        tensors = dict(merged(select_prefix(prefix, checkpoint.tensors), run.model, place))
        weights = LoadedWeights(place, tensors, without_adapters(run.model), log_scale, bias)
        return cls(weights, run, checkpoint, notes)

    @classmethod
    def of_weights(cls, location: str, given: WeightsModelSpec) -> Exported:
        """Loads weights that are no run's, in float32. Raises ClipxError as `load_model`."""
        found, spec, model = load_model(location, "run", torch.device("cpu"), torch.float32, given)
        notes: list[str] = []
        if found.log_scale is None:
            found = replace(found, log_scale=_CLIPS_LOG_SCALE)
            notes = [
                f"logit_scale is {math.exp(_CLIPS_LOG_SCALE):.4g}, where CLIP's training starts: {location} has none"
            ]
        return cls(replace(found, model=model.state_dict(), spec=spec), notes=notes)


def write_export(format: WeightsFormat, out: Path, exported: Exported) -> list[str]:
    """Writes a file or a folder atomically. Returns notes for the user.

    Raises CheckpointError if the format does not support the model.
    """
    assert format.write is not None
    write: Callable[[Path, Exported], Sequence[str]] = pkgutil.resolve_name(format.write)
    announce(f"writing {out}", sum(tensor.nbytes for tensor in exported.weights.model.values()))
    with atomic_output(out) as path:
        return [*exported.notes, *write(path, exported)]


def write_safetensors(path: Path, exported: Exported) -> Sequence[str]:
    """Writes a file with clipx's tensor names and the configuration of the model."""
    save_weights(path, exported.weights, None if exported.checkpoint is None else exported.checkpoint.step)
    return ()


def write_open_clip(folder: Path, exported: Exported) -> Sequence[str]:
    """Writes a folder for open_clip. Raises CheckpointError for a model that open_clip does not have."""
    weights, spec = exported.weights, exported.weights.spec
    assert spec is not None
    image, model = spec.image, config_of(spec)
    if weights.bias is not None:
        model["init_logit_bias"] = weights.bias  # without this key, open_clip's model has no bias
    # Resize and crop as in clipx's evaluation. open_clip takes the size from the model.
    mode = "squash" if image.stretch else "shortest"
    resizing = {"interpolation": str(image.interpolation), "resize_mode": mode}
    preprocess = {**image.normalization, **resizing}
    folder.mkdir()
    if spec.text.tokenizer_place != "clip":
        _copy_tokenizer(spec.text, folder)
        model["text_cfg"]["hf_tokenizer_name"] = TOKENIZER[0]  # any name: open_clip looks in the folder
    config = json.dumps({"model_cfg": model, "preprocess_cfg": preprocess}, indent=1)
    (folder / CONFIG).write_text(config + "\n", encoding="utf-8")
    tensors = open_clip_checkpoint.state_dict(weights)
    save_file(tensors, folder / "open_clip_model.safetensors", {"format": "pt"})
    return ()


def _copy_tokenizer(text: TextTowerSpec, folder: Path) -> None:
    """Copies the tokenizer into the folder, for AutoTokenizer of transformers.

    Of its configuration it keeps what clipx reads: by other values, such as the name of a class, transformers replaces
    parts of tokenizer.json.
    """
    shutil.copyfile(tokenizer_files(text.tokenizer_place)["tokenizer.json"], folder / "tokenizer.json")
    read = ("pad_token", "sep_token", "padding_side", "truncation_side")
    values = {key: value for key, value in read_tokenizer(text.tokenizer_place)[1].items() if key in read}
    if text.pads_last:
        values["padding_side"] = "right"
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    config = json.dumps(values, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yields a temporary path in the folder of `out` and renames it to `out` at the end.

    Raises CheckpointError if the path cannot be written.
    """
    path = out.with_name(f".{out.name}.{uuid4().hex[:12]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield path
        path.rename(out)
    except Exception as error:  # safetensors and torch.save raise others than OSError for a full disk
        if not isinstance(error, OSError) and disk_failure(error) is None:
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise CheckpointError(f"out={out} cannot be written ({reason}): give another path") from error
    finally:
        with suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
