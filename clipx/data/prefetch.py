"""Prefetching of batches to the device: the next batch is copied while the step on the current one computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from clipx.data.batch import Batch


class DevicePrefetcher:
    """Iterator of the same batches. On CUDA `start_next` takes the next one, which the loader copies to the device, on
    a side stream.

    Call `start_next` once the step on a batch is launched: the host then waits for the loader, and the device copies,
    while the step computes. Elsewhere it has no effect. An error of the loader is raised when its batch is asked for,
    so after the steps on all batches before it.
    """

    def __init__(self, batches: Iterable[Batch], device: torch.device) -> None:
        self._batches, self._device = iter(batches), device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Batch | Exception | None = None  # copied, or being copied; an error or StopIteration of the loader

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            return next(self._batches)
        self.start_next()
        found, self._next = self._next, None
        if not isinstance(found, Batch):
            assert found is not None
            raise found
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        found.record_stream(current)  # its memory belongs to the side stream
        return found

    def start_next(self) -> None:
        """Takes the next batch from the loader and begins its copy, unless that was done."""
        if self._stream is None or self._next is not None:
            return
        try:
            with torch.cuda.stream(self._stream):
                self._next = next(self._batches)
        except Exception as error:
            self._next = error
