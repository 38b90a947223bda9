"""Tensor files from untrusted sources, read without executing code in them."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipx.errors import CheckpointError
from clipx.storage.failure import error_text
from clipx.storage.safe_json import shown
from clipx.weights.formats import INDEX, parts_of
from clipx.weights.spec import SUFFIXES

METADATA = "clipx"  # metadata key of clipx's description of the model in a safetensors file
_CONVERT = (
    "convert it in a process that you trust with it: safetensors.torch.save_file(model.state_dict(), "
    "'weights.safetensors')"
)
_SPARE = 1 << 24  # values that a described model may have beyond twice those of its file
_WRAPPER = "module."  # of data parallelism, which wraps a whole model
# Of torch.compile, FSDP and activation checkpointing, which wrap any module. No module of a model has such a name.
_INNER_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def read_tensors(path: Path, keys: Sequence[str] = ("state_dict",)) -> tuple[dict[str, Tensor], str | None]:
    """Returns (tensors by name, clipx's description of the model in the file). Tensors stay on disk until accessed.

    From a training checkpoint, reads only its state_dict, which is under the first of the `keys` that exists. A file
    named *.index.json stands for the parts next to it that it lists. Raises CheckpointError for an incomplete file, or
    one with other values than tensors.
    """
    if path.name.endswith(INDEX):
        return bare_names(path, _joined(path, keys)), None
    tensors, description = _tensors_of(path, keys)
    return bare_names(path, tensors), description


def _tensors_of(path: Path, keys: Sequence[str]) -> tuple[Mapping[str, Tensor], str | None]:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path} is not a file of weights: give one that ends in {', '.join(SUFFIXES)}")
    loaded = unpickled(path)
    state = next((loaded[key] for key in keys if key in loaded), loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state_dict: save the model's state_dict")
    check_state(path, state)
    return state, None


def check_state(path: Path, state: Mapping[Any, Any]) -> None:
    """Checks a state_dict that `unpickled` read.

    Raises CheckpointError for other values than tensors with values in memory.
    """
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            named = name if isinstance(name, str) and name.isprintable() else shown(name)
            raise CheckpointError(
                f"{path} is not a state_dict, because {named} is a {type(value).__name__}, not a tensor: save the "
                "model's state_dict"
            )
        _check_plain(path, name, value)


def _joined(index: Path, keys: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of all parts of a model's weights. Raises CheckpointError for others than `index` lists."""
    found: dict[str, Tensor] = {}
    for part, names in parts_of(index).items():
        path = index.with_name(part)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which {index.name} lists: get this part of the weights again")
        tensors, _ = _tensors_of(path, keys)
        if different := sorted(tensors.keys() ^ names):
            holds = "lacks" if different[0] in names else "holds"
            raise CheckpointError(
                f"{path} {holds} {shown(different[0])}, which is not what {index.name} lists: get both again"
            )
        found |= tensors
    return found


def _safetensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, "pt")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        return tensors, (file.metadata() or {}).get(METADATA)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a valid safetensors file ({error_text(error)}): get it again") from None


def unpickled(path: Path) -> Any:
    """Reads a file of torch.save with weights_only=True: tensors and plain values, without calling any code in it."""
    zipped = _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # content that torch rejects; damaged files raise exceptions of any type
        if isinstance(error, RuntimeError | OSError | EOFError):
            raise CheckpointError(
                f"{path} is not a valid file of torch.save ({error_text(error)}): get it again"
            ) from None
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, or is damaged; reading it with a full unpickler could "
            f"run any code in it: {_CONVERT}"
        ) from None


def _check_archive(path: Path) -> bool:
    """Returns whether a file is a zip archive of torch.save. Raises CheckpointError for another kind of archive.

    torch.save compresses nothing. A compressed member could expand to a thousand times the size of the file.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":  # as torch decides
                return False
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path} is not a valid file of torch.save ({error_text(error)}): get it again") from None
    names = {member.filename for member in members}
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(f"{path} is a TorchScript archive, which is a program: {_CONVERT}")
    packed = any(member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 for member in members)
    if packed or len(names) < len(members) or sum(member.file_size for member in members) > path.stat().st_size:
        raise CheckpointError(
            f"{path} has compressed, encrypted, repeated or overlapping members, which torch.save does not write: save "
            "it again with torch.save"
        )
    return True


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Raises CheckpointError for a tensor without values in memory, sparse, quantized or larger than its storage."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path}: {shown(name)} is a sparse, quantized, repeated or empty tensor ({tensor.layout}, {tensor.device}"
            "): save a state_dict of contiguous tensors"
        )


def bare_names(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors by the names in the model itself, without those of the modules that wrapped it in training.

    Raises CheckpointError for two tensors with one name then.
    """
    names = {name: _INNER_WRAPPERS.sub("", name) for name in tensors}
    while names and all(bare.startswith(_WRAPPER) for bare in names.values()):
        names = {name: bare.removeprefix(_WRAPPER) for name, bare in names.items()}
    found: dict[str, Tensor] = {}
    for name, bare in names.items():
        if bare in found:
            raise CheckpointError(f"{path} has {shown(bare)} twice, once as {shown(name)}: remove one of them")
        found[bare] = tensors[name]
    return found


def check_described(described: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Raises CheckpointError if a configuration describes far more values than its file of weights has.

    Args:
        described: state_dict of the model that it describes, on the meta device.
        tensors: those of the file.
        what: names the file, for errors.
    """
    wanted, found = (sum(tensor.numel() for tensor in part.values()) for part in (described, tensors))
    if wanted > 2 * found + _SPARE:
        raise CheckpointError(
            f"{what} has a configuration of a model of {wanted:,} values, and a file of {found:,}: get both again"
        )
