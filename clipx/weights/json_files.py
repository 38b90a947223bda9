"""JSON files of a model's folder, from untrusted sources. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipx.errors import CheckpointError
from clipx.storage.failure import error_text
from clipx.storage.safe_json import check_sizes, parse_json, read_as, read_regular

INDEX = ".index.json"  # end of the name of the list of the files in which transformers saves a large model
_MOST_PARTS = 1000  # files of a model; the largest have some 200
_PART = re.compile(r"\w[\w.-]*\.(?:safetensors|bin)")


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
