"""Staging memory, and copies of tensors into it. Those from a CUDA device run while it computes the next step."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence

from clipx.config.lazy_torch import torch

log = logging.getLogger(__name__)

Pairs = Sequence[tuple["torch.Tensor", "torch.Tensor"]]
"""(target, source) of copies. The targets are contiguous."""


class HostMemory:
    """Memory of `size` bytes whose pages are mapped: the first touch of a page takes longer than a copy to it."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8)

    def close(self) -> None:
        """Releases the memory. The tensor and its views must not be used any more."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


class PinnedMemory(HostMemory):
    """Page-locked memory of `size` bytes, rounded up to pages. Pageable memory if CUDA refuses to lock it.

    torch's own allocator of page-locked memory rounds up to a power of two: 8.6 GB for a state of 5.1 GB. A shared
    mapping is not copied when a process forks: its pages remain those that the device writes to.
    """

    def __init__(self, size: int) -> None:
        self.tensor = torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=torch.uint8)[:size]
        self._address = self.tensor.data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(self._address, size, 0)) if size else 0
        self._registered = size > 0 and error == 0
        if error:  # copies are as correct, but the host waits for them
            log.warning(
                "%d bytes of memory for checkpoints cannot be page-locked (CUDA error %d): saving takes longer",
                size,
                error,
            )

    def close(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._registered = False
        super().close()


class HostCopies:
    """Copies from the CPU: they are done when `copy` returns."""

    def allocate(self, size: int) -> HostMemory:
        """Returns memory that tensors are copied to fast."""
        return HostMemory(size)

    def copy(self, now: Pairs, until_update: Pairs) -> None:
        """Copies the sources as the work queued so far leaves them.

        `now`: their sources may change by any later work. `until_update`: they change only by work that is queued after
        the next `hold_updates`.
        """
        for target, source in (*now, *until_update):
            target.copy_(source)

    def hold_updates(self) -> None:
        """Makes work that is queued from now on start after the copies. The host does not wait."""

    def synchronize(self) -> None:
        """Waits until the copies are done. Any thread may call it. Raises RuntimeError if a copy failed."""


class CudaCopies(HostCopies):
    """Copies from a CUDA device, by its copy engine: the host does not wait, and the device computes meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def allocate(self, size: int) -> HostMemory:
        return PinnedMemory(size)

    def copy(self, now: Pairs, until_update: Pairs) -> None:
        for target, source in now:  # a source on the host is copied at once
            target.copy_(source, non_blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in until_update:
                target.copy_(source, non_blocking=True)
        self._done.record(self._stream)

    def hold_updates(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        self._done.synchronize()


def copies_from(device: torch.device) -> HostCopies:
    """Returns the copies from a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
