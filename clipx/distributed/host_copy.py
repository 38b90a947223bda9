"""Copies of small device tensors to the host that nothing waits for until they are read."""

from __future__ import annotations

from clipx.config.lazy_torch import torch


class HostCopy:
    """Values of a tensor on their way to the host.

    On CUDA the copy is asynchronous, to pinned memory: `read` waits for the work launched before the copy, not for
    later work.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
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
