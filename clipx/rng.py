"""The state of every random number generator that training may draw from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TorchRng:
    """The generators of the CPU and of one device: what a forward pass may draw from."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def get(cls, device: torch.device) -> TorchRng:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def set(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


def rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON values) of torch's, Python's and NumPy's generators in this process."""
    state = TorchRng.get(device)
    tensors = {"cpu": state.cpu} if state.device is None else {"cpu": state.cpu, "device": state.device}
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return tensors, {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(tensors: dict[str, Tensor], plain: dict[str, Any], device: torch.device) -> None:
    """The inverse of `rng_state`. A device's state is left alone where none was saved."""
    TorchRng(tensors["cpu"], tensors.get("device") if device.type == "cuda" else None).set(device)
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = plain["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
