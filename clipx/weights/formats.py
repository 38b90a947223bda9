"""Formats of weights: what reads a folder by its configuration, and what writes an export, and the JSON files of a
folder, which are of untrusted sources. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipx.config.registry import load_options
from clipx.errors import CheckpointError
from clipx.storage.failure import error_text
from clipx.storage.safe_json import check_sizes, parse_json, read_as, read_regular

CONFIG = "open_clip_config.json"
"""File of a folder of open_clip's weights with the configuration of the model."""

HF_CONFIG = "config.json"
"""File with the configuration of a model of transformers or timm."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

# In the order of open_clip's search in a folder.
WEIGHTS = tuple(
    """open_clip_model.safetensors open_clip_pytorch_model.safetensors open_clip_pytorch_model.bin
    open_clip_pytorch_model.pth model.safetensors pytorch_model.bin pytorch_model.pth model.pth
    model.safetensors.index.json pytorch_model.bin.index.json""".split()
)
"""Names of files of weights in a folder."""


INDEX = ".index.json"  # end of the name of the list of the files in which transformers saves a large model
_MOST_PARTS = 1000  # files of a model; the largest have some 200
_PART = re.compile(r"\w[\w.-]*\.(?:safetensors|bin)")


@dataclass(frozen=True, slots=True)
class WeightsFormat:
    """Format of the weights of a model.

    A module registers it by `register_format`. That of a package is declared as the module of an option is:
    `declare("weights", MODULE, NAME)`.
    """

    name: str
    """Name, also as format=NAME of clipx.export."""

    read: str | None = None
    """Function that reads a folder, as MODULE:NAME: called with a `clipx.weights.load.ModelFolder`, returns
    `LoadedWeights`. None: folders of this format are not read."""

    config: str = HF_CONFIG
    """File of the folder with the configuration of the model."""

    recognizes: Callable[[Mapping[str, Any]], bool] = lambda config: True
    """Returns whether the content of this file is of this format."""

    files: tuple[str, ...] = TOKENIZER
    """Further files of the folder that are read if they are there."""

    weights: tuple[str, ...] = WEIGHTS
    """Names of the file of tensors, or of the index of its parts: the first that is there is `ModelFolder.weights`."""

    write: str | None = None
    """Function that writes an export, as MODULE:NAME: called with a path that does not exist and a
    `clipx.weights.export.Exported`, returns notes for the user. None: the format is not written."""

    suffix: str = ""
    """Suffix of a file that is written. Empty: a folder."""

    usage: str = "{out}"
    """Code, option or command that loads an export at {out}."""

    of_run: bool = False
    """True if the writer needs a run: it also writes the state of the optimizer."""


_formats: dict[str, WeightsFormat] = {}


def register_format(format: WeightsFormat) -> None:
    """Registers a format in place of one of the same name."""
    _formats[format.name] = format


def formats() -> dict[str, WeightsFormat]:
    """Returns all formats by name: those of clipx first, then those of packages."""
    load_options("weights")
    return _formats


def writers() -> dict[str, WeightsFormat]:
    """Returns the formats that clipx.export writes, by name."""
    return {name: format for name, format in formats().items() if format.write is not None}


def readers() -> dict[str, WeightsFormat]:
    """Returns the formats of folders that are read, by name."""
    return {name: format for name, format in formats().items() if format.read is not None}


def descriptions() -> tuple[str, ...]:
    """Returns the names of the files that describe a model in a folder."""
    return tuple(dict.fromkeys(name for format in readers().values() for name in (format.config, *format.files)))


def weight_files() -> tuple[str, ...]:
    """Returns the names of files of weights in a folder, of all formats that are read."""
    return tuple(dict.fromkeys(name for format in readers().values() for name in format.weights))


def configurations() -> set[str]:
    """Returns the names of the files by which a folder of weights is recognized."""
    return {format.config for format in readers().values()}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError for any other file, and for sizes that no model has."""
    try:
        values = parse_json(read_regular(path))
        check_sizes(values)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error_text(error)}): restore it") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object: restore it")
    return values


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: dict[str, str]  # name of a tensor: name of its file


def parts_of(index: Path) -> dict[str, set[str]]:
    """Returns the names of the tensors in each file that the index of a model of transformers lists.

    Raises CheckpointError for another file, and for names of files that are not next to it.
    """
    try:
        listed = read_as(_Index, read_regular(index)).weight_map
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} cannot be read ({error_text(error)}): restore it") from None
    parts: dict[str, set[str]] = {}
    for name, part in listed.items():
        parts.setdefault(part, set()).add(name)
    if not parts or not all(map(_PART.fullmatch, parts)):
        raise CheckpointError(f"{index} does not list the files of the weights: restore it")
    if len(parts) > _MOST_PARTS:
        raise CheckpointError(f"{index} lists {len(parts):,} files of weights, more than {_MOST_PARTS:,}: restore it")
    return dict(sorted(parts.items()))


register_format(
    WeightsFormat(
        name="open_clip",
        read="clipx.weights.load:read_open_clip",
        config=CONFIG,
        write="clipx.weights.export:write_open_clip",
        usage='open_clip.create_model_and_transforms("local-dir:{out}")',
    )
)


register_format(
    WeightsFormat(
        name="safetensors",
        write="clipx.weights.export:write_safetensors",
        suffix=".safetensors",
        usage="model.weights={out}",
    )
)
register_format(
    WeightsFormat(
        name="open_clip_checkpoint",
        write="clipx.weights.open_clip_checkpoint:write",
        suffix=".pt",
        usage="python -m open_clip_train.main --resume {out}",
        of_run=True,
    )
)
