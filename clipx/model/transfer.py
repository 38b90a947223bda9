"""Copies between the host and a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device. A copy to CUDA is from pinned memory: from other memory, the host would wait."""
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda and x.numel() else x
    return pinned.to(device, non_blocking=True)


class HostCopy:
    """Values of a small tensor on their way to the host.

    On CUDA the copy is asynchronous, to pinned memory: `read` waits for the work launched before the copy, not for
    later work.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Starts the copy. The tensor must not change afterwards."""
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.cpu()

    def read(self) -> list[float]:
        """Returns the values."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._values.tolist()
        return values
