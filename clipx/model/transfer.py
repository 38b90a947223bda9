"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device. A copy to CUDA is from pinned memory: from other memory, the host would wait."""
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
    return pinned.to(device, non_blocking=True)
