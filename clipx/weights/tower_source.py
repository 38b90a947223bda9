"""Sources of the weights of the image tower: models of timm, and the towers of CLIP models.

    image_source(location, spec) -> TimmWeights | LoadedWeights      head_source(location) -> tensors

Files of others are read without executing code in them: see files.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.models import get_pretrained_cfg
from torch import Tensor

from clipx.errors import CheckpointError, ConfigError
from clipx.model.tower_spec import timm_weights_of
from clipx.storage.files import is_local
from clipx.storage.hub import HUB, each_hub_file
from clipx.storage.safe_json import shown
from clipx.weights.download import errors_of, fetched, fetched_model, files_at
from clipx.weights.files import read_tensors
from clipx.weights.formats import HF_CONFIG, INDEX, read_json
from clipx.weights.load import LoadedWeights, load_weights, local_path_of
from clipx.weights.open_clip import is_clip
from clipx.weights.spec import SUFFIXES

_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_INDICES = tuple(f"{name}{INDEX}" for name in _WEIGHTS[:2])
# Keys of a training checkpoint, in timm's order: an average of the weights first.
_STATES = ("state_dict_ema", "model_ema", "state_dict", "model", "module", "teacher")

INPUT = ("mean", "std", "interpolation", "stretch")
"""Options of model.image for the images that a tower reads."""

Files = Callable[..., Iterator[Path]]
"""Yields the local paths of those of the named files that a folder has."""


@dataclass(frozen=True, slots=True)
class TimmWeights:
    """Tensors of a timm model by the names of their file."""

    location: str
    tensors: Mapping[str, Tensor]
    architecture: str | None = None  # timm's name; None: unknown
    input: Mapping[str, Any] = field(default_factory=dict)  # known ones of INPUT, and input_size
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of timm.create_model stored with the weights


def image_source(location: str, architecture: str) -> TimmWeights | LoadedWeights:
    """Loads the weights at `location`: any value of model.image.weights. `architecture`: model.image.timm.

    Raises ClipxError for a location without weights, or with weights that cannot be read safely.
    """
    with errors_of("model.image.weights"):
        found = find_timm(location, architecture)
        if found is not None:
            return found
        path = _file_of(location)
        if path is not None:
            tensors, description = read_tensors(path, _STATES)
            if description is None and not is_clip(tensors):
                return TimmWeights(location, tensors)
        return load_weights(location)


def head_source(location: str) -> Mapping[str, Tensor]:
    """Loads the tensors of the file at `location`: any value of model.image.head_weights. Raises ClipxError."""
    with errors_of("model.image.head_weights"):
        path = _file_of(location)
        if path is None:
            raise CheckpointError(
                f"model.weights={location} is not a file of weights: give one that ends in {', '.join(SUFFIXES)}"
            )
        return read_tensors(path, _STATES)[0]


def input_of(source: TimmWeights | LoadedWeights) -> Mapping[str, Any]:
    """Returns the values of the images with which weights were trained, by their keys in model.image. Empty if
    unknown."""
    if isinstance(source, TimmWeights):
        return {key: source.input[key] for key in INPUT if key in source.input}
    if source.spec is None or not source.spec.image.kind.has_trunk:
        return {}
    return {key: getattr(source.spec.image, key) for key in INPUT}


def find_timm(location: str, architecture: str = "") -> TimmWeights | None:
    """Loads a model that timm describes: timm:NAME, or a folder or repository with timm's config.json. Returns None for
    other locations. `architecture`: timm's name that timm alone stands for. Raises ClipxError."""
    name = timm_weights_of(location)
    if name is not None:
        return _of_timm(location, name or architecture)
    files = files_of(location)
    config = config_of(files)
    if files is None or "architecture" not in config:
        return None
    return _of_timm_folder(location, files, config)


# ------------------------------------------------------------------------------------------------------- folders


def files_of(location: str) -> Files | None:
    """Returns the files of a folder or repository with config.json. None for other locations.

    A URL is fetched with its config.json and its weights.
    """
    if location.startswith(HUB):
        return partial(each_hub_file, location)
    if location.endswith(SUFFIXES):
        return None
    if is_local(location):
        folder = local_path_of(location)
    else:
        url = location.rstrip("/")
        names = files_at(url)
        if HF_CONFIG not in names:
            return None
        folder = fetched_model(url, names, (HF_CONFIG,), (*_WEIGHTS, *_INDICES))
    return lambda *names: (folder / name for name in names if (folder / name).is_file())


def config_of(files: Files | None) -> dict[str, Any]:
    """Returns the content of config.json. Empty without one."""
    found = None if files is None else next(files(HF_CONFIG), None)
    return {} if found is None else read_json(found)


def _file_of(location: str) -> Path | None:
    if location.startswith(HUB) or not location.endswith(SUFFIXES):
        return None
    path = local_path_of(location)
    return path if path.is_file() else None


def first_of(location: str, files: Files, names: tuple[str, ...]) -> Path:
    found = next(files(*names), None)
    if found is None:
        raise CheckpointError(f"model.weights={location} has no file of weights: give one with {' or '.join(names)}")
    return found


# ---------------------------------------------------------------------------------------------------------- timm


def _of_timm(location: str, name: str) -> TimmWeights:
    """Loads the weights that timm names for NAME or NAME.TAG, from the hub's cache or the hub."""
    key = f"model.weights={location}"
    try:
        cfg = get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # a known architecture, an unknown tag
        cfg = None
    if cfg is None or not cfg.has_weights:
        tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
        known = f"give one of {', '.join(tags[:5])}" if tags else "give one from timm.list_pretrained()"
        raise ConfigError(f"{key}: timm has no weights of {name}: {known}")
    custom = cfg.custom_load == "hf" if cfg.hf_hub_id is not None else cfg.custom_load  # as timm decides
    if custom:
        raise ConfigError(f"{key}: {name} has weights of another library, which only timm reads: save them with timm")
    if cfg.hf_hub_id is not None:
        place = HUB + cfg.hf_hub_id
        path = first_of(location, partial(each_hub_file, place), _hub_names(cfg.hf_hub_filename))
    else:
        url = cfg.url if isinstance(cfg.url, str) else cfg.url[0]
        path = fetched(url)
    return TimmWeights(location, read_tensors(path, _STATES)[0], name, _known_input(cfg.to_dict()))


def _hub_names(name: str | None) -> tuple[str, ...]:
    """Returns the files to look for, as timm does: safetensors first."""
    if name is None:
        return _WEIGHTS[:2]
    known = {"open_clip_pytorch_model.bin": "open_clip_model.safetensors"}
    return known.get(name, f"{name.rpartition('.')[0]}.safetensors"), name


def _of_timm_folder(location: str, files: Files, config: Mapping[str, Any]) -> TimmWeights:
    name, cfg, options = config["architecture"], config.get("pretrained_cfg", config), config.get("model_args") or {}
    if not isinstance(name, str) or not isinstance(cfg, Mapping) or not isinstance(options, Mapping):
        raise CheckpointError(f"{location}: {HF_CONFIG} is not the configuration of a timm model: restore it")
    tensors, _ = read_tensors(first_of(location, files, _WEIGHTS), _STATES)
    return TimmWeights(location, tensors, name, _known_input(cfg), options)


def _known_input(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the images with which weights were trained. Raises CheckpointError for invalid ones."""
    found = {key: cfg[key] for key in (*INPUT, "input_size") if cfg.get(key) is not None}
    for key in ("mean", "std"):
        value = found.get(key, (0.5, 0.5, 0.5))
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(isinstance(x, float | int) for x in value):
            raise CheckpointError(
                f"{key}={shown(value)} of the weights is not a list of 3 numbers: restore {HF_CONFIG}"
            )
    return found
