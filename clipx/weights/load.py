"""Loading of trained weights from a path or a URL, under clipx's tensor names.

    load_weights(location) -> LoadedWeights        load_into(model, weights)        save_weights(path, weights, step)
    load_model(location, key, device, dtype) -> (LoadedWeights, ModelSpec, CLIP)

Reads weights of clipx, open_clip and OpenAI, and folders of any format of formats.py: see open_clip.py for their names.
files.py reads untrusted files without executing code in them.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from pydantic import FiniteFloat
from safetensors.torch import save_file
from torch import Tensor

from clipx.checkpoint.format import Checkpoint, CheckpointDir
from clipx.checkpoint.records import STATE
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.checkpoint.state import load_module, select_prefix
from clipx.config.compose import checked, compose_config, config_folders
from clipx.config.messages import COMPOSITION_ERRORS
from clipx.config.names import name_of
from clipx.config.registry import option_files
from clipx.config.saved import option_from_dict, to_dict
from clipx.errors import CheckpointError, ClipxError
from clipx.model.clip import CLIP, SkipDraws
from clipx.model.lora import initial_adapters, merged, without_adapters
from clipx.model.spec import ModelSpec
from clipx.storage.files import is_local, local_path
from clipx.storage.hub import HUB, each_hub_file, hub_files
from clipx.storage.safe_json import check_sizes, read_as
from clipx.storage.url import check_url
from clipx.weights.compare import check_same, check_same_tower
from clipx.weights.download import errors_of, fetched, fetched_checkpoint, fetched_model, files_at
from clipx.weights.files import METADATA, check_described, read_tensors
from clipx.weights.formats import (
    CONFIG,
    HF_CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    configurations,
    descriptions,
    parts_of,
    read_json,
    readers,
    weight_files,
)
from clipx.weights.open_clip import from_open_clip, spec_of, temperature_of, tower_from_open_clip
from clipx.weights.positions import fit_positions, stretch_text_positions, with_context
from clipx.weights.spec import LOCAL, SUFFIXES, WeightsChoice, no_weights

if TYPE_CHECKING:
    from clipx.command_spec import WeightsModelSpec


_PROJECTIONS = ("text_projection", "text.text_projection", "text_projection.weight", "text.text_projection.weight")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Tensors of a model by their names in its state_dict, with configuration and temperature.

    Without a configuration, the model is unknown and the names are open_clip's.
    """

    location: str  # as the user gave it
    model: Mapping[str, Tensor]
    spec: ModelSpec | None  # the configuration stored with the weights
    log_scale: float | None = None  # log of the inverse temperature α at the end of training
    bias: float | None = None  # bias of a sigmoid loss


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Folder of weights in the format of another library, or its copy of a repository of the hub."""

    location: str  # as the user gave it
    files: Mapping[str, Path]  # those that describe the model, by name
    config: Mapping[str, Any]  # content of the file by which the format was found
    weights: Path

    @property
    def name(self) -> str:
        """Name of the model."""
        return name_of(self.location)

    def tensors(self) -> dict[str, Tensor]:
        """Reads the tensors by the names of their file, without executing code in it. Raises CheckpointError."""
        return read_tensors(self.weights)[0]


@dataclass(frozen=True, slots=True)
class _Description:
    """Description of a model in the metadata of a safetensors file of clipx."""

    model: dict[str, Any]
    log_scale: FiniteFloat | None
    bias: FiniteFloat | None


def save_weights(path: Path, weights: LoadedWeights, step: int | None) -> None:
    """Writes a safetensors file with clipx's tensor names and the configuration in its metadata, for `load_weights`.

    `step`: step of the checkpoint of the weights, if any.
    """
    assert weights.spec is not None
    model = to_dict(weights.spec)
    for initialized in (model, model["image"], model["text"]):
        initialized["weights"] = None
    model["image"]["head_weights"] = None
    described = {
        "model": model,
        "log_scale": weights.log_scale,
        "bias": weights.bias,
        "step": step,
    }
    tensors = {name: tensor.contiguous() for name, tensor in weights.model.items()}
    save_file(tensors, path, {"format": "pt", METADATA: json.dumps(described)})


def load_weights(location: str) -> LoadedWeights:
    """Loads the weights at `location`.

    A location is a run directory (its newest checkpoint, the moving average if it has one), one of its checkpoints, a
    folder with open_clip_config.json, or with the config.json of transformers' CLIPModel or of another format,
    hf-hub:ORG/NAME of these, or a file, whose suffix names the format. All but hf-hub may be URLs. Raises
    CheckpointError for a location without weights, or with weights that cannot be read safely.
    """
    check_url("model.weights", location)
    if location.startswith(HUB):
        paths = {path.name: path for path in hub_files(location, *descriptions())}
        weights = next(each_hub_file(location, *weight_files()), None)
        if weights is not None and weights.name.endswith(INDEX):
            hub_files(location, *parts_of(weights))
        return _of_folder(location, paths, weights)
    path = local_path_of(location)
    if path.is_file():
        return _of_file(location, path)
    if is_checkpoint(path.name):
        return _of_run(location, CheckpointDir(path.parent, print), step_of(path))
    paths = {name: path / name for name in descriptions() if (path / name).is_file()}
    if configurations() & paths.keys():
        weights = next((path / name for name in weight_files() if (path / name).is_file()), None)
        return _of_folder(location, paths, weights)
    if (path / CHECKPOINTS).is_dir():
        return _of_run(location, CheckpointDir(path / CHECKPOINTS, print), None)
    raise no_weights(location, "holds no weights" if path.exists() else "does not exist")


def local_path_of(location: str) -> Path:
    """Returns the local path of a location that is not on the hub. Downloads a URL."""
    location = location.removeprefix(LOCAL)
    if is_local(location):
        return Path(local_path(location))
    url = location.rstrip("/")
    if url.endswith(SUFFIXES):
        return fetched(url)
    if not configurations() & (names := files_at(url)):
        return fetched_checkpoint(url)
    return fetched_model(url, names, descriptions(), weight_files())


# ------------------------------------------------------------------------------------------------ kinds of locations


def _of_run(location: str, folder: CheckpointDir, step: int | None) -> LoadedWeights:
    checkpoint = folder.load(step)
    if checkpoint is None:
        raise CheckpointError(f"model.weights={location} holds no checkpoint: check the path")
    config = checkpoint.state.get("config", {}).get("model")
    if not isinstance(config, dict):
        raise CheckpointError(f"{checkpoint.folder}/{STATE} does not describe its model: restore it")
    spec: ModelSpec = option_from_dict("model", config)
    tensors = select_prefix(weights_part(checkpoint, WeightsChoice.auto, location), checkpoint.tensors)
    tensors = merged(tensors, spec, location)
    return LoadedWeights(location, tensors, without_adapters(spec), *learned_temperature(checkpoint))


def weights_part(checkpoint: Checkpoint, choice: WeightsChoice, run: str) -> str:
    """Returns the prefix of the selected weights in a run's checkpoint. Raises CheckpointError if it has none."""
    averaged = any(name.startswith("average/") for name in checkpoint.tensors)
    if choice is WeightsChoice.average and not averaged:
        raise CheckpointError(
            f"weights=average: run={run} has no average (optimizer.ema_decay=null): choose weights=trained"
        )
    return "average" if averaged and choice is not WeightsChoice.trained else "model"


def learned_temperature(checkpoint: Checkpoint) -> tuple[float | None, float | None]:
    """Returns (log α, bias) that the objective of a run learned for all pairs. None for what it does not learn."""
    return temperature_of(select_prefix("objective", checkpoint.tensors), "temperature.log_scale", "bias")


def _of_file(location: str, path: Path) -> LoadedWeights:
    tensors, description = read_tensors(path)
    if description is None:
        return LoadedWeights(location, tensors, None, *temperature_of(tensors))
    try:
        found = read_as(_Description, description)
        check_sizes(found.model)
    except ValueError as error:
        raise CheckpointError(
            f"{location} has an invalid description of its model ({error}): export it again"
        ) from None
    spec: ModelSpec = option_from_dict("model", found.model)
    check_described(spec.build(torch.device("meta"), torch.float32).state_dict(), tensors, location)
    return LoadedWeights(location, tensors, spec, found.log_scale, found.bias)


def _of_folder(location: str, paths: Mapping[str, Path], weights: Path | None) -> LoadedWeights:
    """Loads a model in the format that its configuration shows. `paths`: paths of the other files, by name."""
    known = readers()
    for found in known.values():
        if found.config not in paths:
            continue
        config = read_json(paths[found.config])
        if not found.recognizes(config):
            continue
        if weights is None:
            raise CheckpointError(
                f"model.weights={location} has no file of weights: give a folder with one of {', '.join(found.weights)}"
            )
        read: Callable[[ModelFolder], LoadedWeights] = pkgutil.resolve_name(str(found.read))
        return read(ModelFolder(location, paths, config, weights))
    raise CheckpointError(
        f"model.weights={location} has no {CONFIG}, and its {HF_CONFIG} is of no format that is read "
        f"({', '.join(known)}): give a model in open_clip's form, with {CONFIG} and one of {', '.join(WEIGHTS)}, or "
        "install the package of its format; for the text tower of a model of transformers, give model/text=hf"
    )


def read_open_clip(folder: ModelFolder) -> LoadedWeights:
    """Reads a model in open_clip's form. Raises CheckpointError."""
    spec, location = spec_of(dict(folder.config), folder.name), folder.location
    if TOKENIZER[0] in folder.files and spec.text.tokenizer_place != "clip":
        tokenizer = str(folder.files[TOKENIZER[0]])
        spec = replace(spec, text=replace(spec.text, tokenizer=tokenizer))
    tensors = folder.tensors()
    found = from_open_clip(spec, tensors, location)
    check_described(spec.build(torch.device("meta"), torch.float32).state_dict(), tensors, location)
    return LoadedWeights(location, found, spec, *temperature_of(tensors))


# -------------------------------------------------------------------------------------------------------- loading


def load_model(
    location: str, key: str, device: torch.device, dtype: torch.dtype, given: WeightsModelSpec | None = None
) -> tuple[LoadedWeights, ModelSpec, CLIP]:
    """Builds a trained model in evaluation mode, without gradients. Raises ClipxError as `load_with_spec` does."""
    weights, spec = load_with_spec(location, key, given)
    with SkipDraws():
        model = spec.build(device, dtype)
    load_into(model, weights)
    model.eval().requires_grad_(False)
    return weights, spec, model


def load_with_spec(location: str, key: str, given: WeightsModelSpec | None = None) -> tuple[LoadedWeights, ModelSpec]:
    """Loads the weights at `location`, the value of the option `key`. See `load_all_with_specs`."""
    return load_all_with_specs([(key, location)], given)[0]


def load_all_with_specs(
    places: Sequence[tuple[str, str]], given: WeightsModelSpec | None = None
) -> list[tuple[LoadedWeights, ModelSpec]]:
    """Loads weights with their configurations.

    Args:
        places: (option, its value: any value of model.weights) of each.
        given: options of the command, whose model is that of the weights without a configuration. None: it has none.

    Raises ClipxError if some cannot be read, or have neither a configuration nor a given model, or if all have a
    configuration and a model is given.
    """
    loaded = []
    for key, location in places:
        with errors_of(key):
            loaded.append((f"{key}={location}", load_weights(location)))
    if given is not None and all(weights.spec is not None for _, weights in loaded):
        given.check_unused(loaded[0][0])
    return [(weights, weights.spec) if weights.spec else _described(weights, place, given) for place, weights in loaded]


def _described(weights: LoadedWeights, place: str, given: WeightsModelSpec | None) -> tuple[LoadedWeights, ModelSpec]:
    """Returns weights without a configuration as those of the given model. Raises CheckpointError without one."""
    spec = None if given is None else given.model
    if spec is None:
        fix = "give the output of python -m clipx.export format=safetensors model=… for them"
        if given is not None:
            fix = f"give model={' or model='.join(_fitting_options(weights.model)) or '…'}, that of the training"
        raise CheckpointError(
            f"{place} holds weights without a configuration, so towers, tokenizer and image size are unknown: {fix}"
        )
    return replace(weights, model=from_open_clip(spec, weights.model, place), spec=spec), spec


def _fitting_options(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the options of the running command's group model with the names and shapes of `tensors`.

    Builds only models with their dimension of embeddings, in a few seconds. Models with equal names and shapes, such as
    those with another activation, all fit. `tensors`: by open_clip's names.
    """
    if not HydraConfig.initialized():
        return []
    command, folders = str(HydraConfig.get().job.config_name), config_folders()
    sizes = {size for name in _PROJECTIONS if name in tensors for size in tensors[name].shape}

    def fits(name: str) -> bool:
        try:
            return _has_shapes(checked(compose_config(command, [f"model={name}"], folders).model), tensors)
        except (ClipxError, *COMPOSITION_ERRORS):
            return False

    files = option_files("model", folders).items()
    near = [name for name, path in files if OmegaConf.select(OmegaConf.load(path), "embed_dim") in (None, *sizes)]
    return [name for name in near if sizes and fits(name)]


def _has_shapes(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> bool:
    found = from_open_clip(spec, tensors)
    wanted = spec.build(torch.device("meta"), torch.float32).state_dict()
    return all(found[name].shape == tensor.shape for name, tensor in wanted.items())


def load_into(model: CLIP, weights: LoadedWeights, initial: bool = False) -> list[str]:
    """Loads weights into the model, strictly. Returns notes on changes to the weights, for the log.

    Interpolates learned positional embeddings (bicubic, antialiased) to another image size. Adapters start from these
    weights. `initial`: as the initial weights of a run, whose text positions model.text.stretch_keep stretches. Raises
    CheckpointError for weights of another model, with both values of each difference, and for missing or unexpected
    tensors and shapes.
    """
    tensors, notes = compared(model.spec, weights, initial)
    fitted, changed = fit_positions(model, tensors)
    norms, adapters = initial_adapters(model, fitted)
    load_module(model, {**fitted, **norms} if norms else fitted, f"model at {weights.location}", adapters)
    return [*notes, *changed]


def compared(
    spec: ModelSpec, weights: LoadedWeights, initial: bool, tower: str | None = None
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Returns the tensors of weights for a model, or for one `tower` of it, by clipx's names, and lines for the log.

    `initial`: whether model.text.stretch_keep stretches text positions. Raises ClipxError for weights of another model.
    """
    tensors, notes = weights.model, list[str]()
    keep, length = spec.text.kept_positions if initial else None, spec.text.context_length
    if weights.spec is None:
        if tower is None:
            tensors = from_open_clip(spec, tensors, weights.location)
        else:
            tensors = tower_from_open_clip(spec, tower, tensors)
        notes = [f"{weights.location} has no configuration: only names and shapes were compared"]
    else:
        theirs = weights.spec if keep is None else with_context(weights.spec, length)
        if tower is None:
            check_same(spec, theirs, weights.location)
        else:
            check_same_tower(spec, theirs, tower, weights.location)
    if keep is not None:
        tensors, note = stretch_text_positions(tensors, keep, length, weights.location)
        notes.append(note)
    return tensors, notes
