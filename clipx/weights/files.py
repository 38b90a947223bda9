"""Files of tensors that others have written, read without running what is in them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipx.errors import CheckpointError
from clipx.storage.remote import error_text

METADATA = "clipx"  # the key of what clipx says of the model in a safetensors file
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_CONVERT = (
    "in a process that you trust with it, convert it: safetensors.torch.save_file(model.state_dict(), "
    "'weights.safetensors')"
)
_WRAPPERS = ("module.", "_orig_mod.")  # that data parallelism and torch.compile put before all names


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """(tensors by name, what clipx says in the file of the model). Tensors stay on disk until they are looked at.

    Of a training checkpoint its state_dict alone. Raises CheckpointError for what is not whole, or not tensors alone.
    """
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path} is no file of weights: give one that ends in {', '.join(SUFFIXES)}")
    loaded = unpickled(path)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state_dict: save the model's state_dict")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} is no state_dict: its {name} is a {type(value).__name__}, not a tensor; save the model's "
                "state_dict"
            )
    return _bare(dict(state)), None


def _safetensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, "pt")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        return _bare(tensors), (file.metadata() or {}).get(METADATA)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error_text(error)}): fetch it again") from None


def unpickled(path: Path) -> Any:
    """By torch's reader that makes tensors and plain values, and calls nothing."""
    zipped = zipfile.is_zipfile(path)
    if zipped and _is_script(path):
        raise CheckpointError(f"{path} is a TorchScript archive, which is a program: {_CONVERT}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # what it refuses; and on damaged files it keeps to no list
        if isinstance(error, RuntimeError | OSError | EOFError):
            raise CheckpointError(
                f"{path} is not a whole file of torch.save ({error_text(error)}): fetch it again"
            ) from None
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, or is damaged, and reading it otherwise could run "
            f"anything that is in it: {_CONVERT}"
        ) from None


def _is_script(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where it is not a table of values."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error_text(error)}): restore it") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a table of values: restore it")
    return values
