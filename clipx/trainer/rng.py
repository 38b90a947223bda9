"""The state of every random number generator that training may draw from."""

from __future__ import annotations

import random
from dataclasses import dataclass

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


def seed_all(seed: int) -> None:
    """torch's generators, Python's and NumPy's, in this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


# What Python's and NumPy's generators consist of: 624 words of a Mersenne twister, and a normal number kept for later.
_PLAIN = np.dtype(
    [
        *(("python", "<u4", 625), ("python_kept", "<u4"), ("python_gauss", "<f8")),
        *(("numpy", "<u4", 624), ("numpy_place", "<u4"), ("numpy_kept", "<u4"), ("numpy_gauss", "<f8")),
    ]
)


def rng_state(device: torch.device) -> Tensor:
    """torch's, Python's and NumPy's generators in this process, as bytes [n]; n depends on the kind of device alone."""
    plain = np.zeros(1, _PLAIN)
    (_, plain["python"], gauss), numpy = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002
    plain["python_kept"], plain["python_gauss"] = gauss is not None, gauss or 0.0
    _, plain["numpy"], plain["numpy_place"], plain["numpy_kept"], plain["numpy_gauss"] = numpy
    state = TorchRng.get(device)
    own = () if state.device is None else (state.device,)
    return torch.cat([torch.from_numpy(plain.view(np.uint8)), state.cpu, *own])


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """The inverse of `rng_state`. A device's generator is left alone where none was saved."""
    length = torch.get_rng_state().numel()
    parts = state.split([_PLAIN.itemsize, length, state.numel() - _PLAIN.itemsize - length])
    plain = parts[0].clone().numpy().view(_PLAIN)[0]
    own = parts[2] if device.type == "cuda" and parts[2].numel() else None
    TorchRng(parts[1].clone(), None if own is None else own.clone()).set(device)
    gauss = float(plain["python_gauss"]) if plain["python_kept"] else None
    random.setstate((3, tuple(plain["python"].tolist()), gauss))
    kept = int(plain["numpy_place"]), int(plain["numpy_kept"]), float(plain["numpy_gauss"])
    np.random.set_state(("MT19937", plain["numpy"], *kept))  # noqa: NPY002
