"""State of all random number generators that training may use."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TorchRng:
    """State of torch's generators of the CPU and of one device, which a forward pass may use."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def get(cls, device: torch.device) -> TorchRng:
        """Returns the current state of the generators."""
        return cls(torch.get_rng_state(), _device_state(device))

    def set(self, device: torch.device) -> None:
        """Sets the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, *_arguments(device))


def _device_state(device: torch.device) -> Tensor | None:
    """Returns the state of an accelerator's generator; None for the CPU."""
    if device.type == "cpu":
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(*_arguments(device))
    return state.cpu()


def _arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # mps has one device


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, Python and NumPy in this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


# State of Python's and NumPy's generators: 624 words of a Mersenne twister, a position, and one cached normal number.
_PLAIN = np.dtype(
    [
        ("python", "<u4", 625),
        ("python_kept", "<u4"),
        ("python_gauss", "<f8"),
        ("numpy", "<u4", 624),
        ("numpy_place", "<u4"),
        ("numpy_kept", "<u4"),
        ("numpy_gauss", "<f8"),
    ]
)


def rng_state(device: torch.device) -> Tensor:
    """Returns the state of torch's, Python's and NumPy's generators as bytes [n]; n depends only on the device type."""
    plain = np.zeros(1, _PLAIN)
    (_, plain["python"], gauss), numpy = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002
    plain["python_kept"], plain["python_gauss"] = gauss is not None, gauss or 0.0
    _, plain["numpy"], plain["numpy_place"], plain["numpy_kept"], plain["numpy_gauss"] = numpy
    state = TorchRng.get(device)
    own = () if state.device is None else (state.device,)
    return torch.cat([torch.from_numpy(plain.view(np.uint8)), state.cpu, *own])


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Restores the state that `rng_state` returned. A device's generator is unchanged if its state was not saved."""
    length = torch.get_rng_state().numel()
    parts = state.split([_PLAIN.itemsize, length, state.numel() - _PLAIN.itemsize - length])
    plain = parts[0].clone().numpy().view(_PLAIN)[0]
    own = parts[2] if device.type != "cpu" and parts[2].numel() else None
    TorchRng(parts[1].clone(), None if own is None else own.clone()).set(device)
    gauss = float(plain["python_gauss"]) if plain["python_kept"] else None
    random.setstate((3, tuple(plain["python"].tolist()), gauss))
    kept = int(plain["numpy_place"]), int(plain["numpy_kept"]), float(plain["numpy_gauss"])
    np.random.set_state(("MT19937", plain["numpy"], *kept))  # noqa: NPY002
