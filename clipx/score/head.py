"""A linear head on image embeddings, such as a predictor of aesthetic ratings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clipx.data.npy import read_npz
from clipx.errors import CheckpointError, DataError
from clipx.weights.files import read_tensors

_NUMPY = ".npz"
_FIX = "give a .safetensors, .pt or .npz file"


@dataclass(frozen=True, slots=True)
class LinearHead:
    """score_B = embeddings_BD · weight_D + bias."""

    weight_D: Tensor
    bias: float

    def __call__(self, image_BD: Tensor) -> Tensor:
        return image_BD.double() @ self.weight_D + self.bias


def load_head(file: str, width: int) -> LinearHead:
    """Reads the head of embeddings of `width` numbers. Raises DataError."""
    tensors = _tensors(file)
    found = {name: [value for key, value in tensors.items() if key.endswith(name)] for name in ("weight", "bias")}
    for name, values in found.items():
        if len(values) != 1:
            raise DataError(
                f"head={file} holds {len(values)} tensors whose names end in {name}, of {', '.join(sorted(tensors))}: "
                "give one weight and one bias"
            )
    weight, bias = (values[0].double().flatten() for values in found.values())
    if len(weight) != width or len(bias) != 1:
        raise DataError(
            f"head={file} has a weight of {len(weight)} and a bias of {len(bias)} numbers: the embeddings of run= have "
            f"{width} dimensions, give {width} and 1"
        )
    if not bool(torch.isfinite(torch.cat([weight, bias])).all()):
        raise DataError(f"head={file} has numbers that are not finite: give another file")
    return LinearHead(weight, float(bias))


def _tensors(file: str) -> Mapping[str, Tensor]:
    path = Path(file).expanduser()
    try:
        if path.suffix != _NUMPY:
            return read_tensors(path)[0]
        arrays = read_npz(path, f"head={file}", _FIX)
        return {name: torch.from_numpy(array.astype(np.float64)) for name, array in arrays.items()}
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        raise DataError(f"head={file} cannot be read ({error}): {_FIX}") from None
