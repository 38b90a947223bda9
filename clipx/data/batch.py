"""Batches of training samples, and their parts: loader processes make at most PART_SAMPLES samples at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipx.data.inputs import Inputs, Texts, mapped
from clipx.data.source import BadRecord
from clipx.model.transfer import moved
from clipx.storage.remote import NO_TRAFFIC, StorageTraffic

PART_SAMPLES = 512  # largest number of samples that a loader process makes at a time: 77 MB of images of 224 pixels

_INLINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of b samples of this rank, or a part of one.

    Args:
        image: inputs of the image tower.
        text: tokens of the captions.
        index: numbers of the samples in the source, on the host.
        bad: samples that could not be used and were replaced, with the reason.
        targets: rows that the objective compares with, one per sample: labels, or a teacher's embeddings.
        traffic: what was read from remote storage since the batch before of the same process.

    Shape:
        b samples, k captions of a sample, L length of a text, S side of the image in pixels.

        - `image.rows`: `[b, 3, S, S]`, uint8, of RGB images; other kinds of images have their own rows.
        - `text.rows`: `[k·b, L]`, int64.
        - `index`: `[b]`, int64.
        - `targets`: `[b, …]` each.

    Raises:
        DataError: `to` cannot decode images that the device decodes.
        FrozenInstanceError: a field is assigned. Use `dataclasses.replace`.

    Example:
        Two parts of four samples, joined and divided into two micro-batches:

            >>> import torch
            >>> from clipx.data.batch import Batch
            >>> from clipx.data.inputs import Inputs, Texts
            >>> images = torch.zeros(4, 3, 48, 48, dtype=torch.uint8)
            >>> tokens = torch.ones(4, 20, dtype=torch.int64)
            >>> first, second = (Batch(Inputs((images,)), Texts((tokens,)), torch.arange(i, i + 4)) for i in (0, 4))
            >>> batch = Batch.join([first, second]).to(torch.device("cpu"))
            >>> batch.index.tolist()
            [0, 1, 2, 3, 4, 5, 6, 7]
            >>> [list(part.shape) for part in batch.image.split(micro_batches=2)]
            [[4, 3, 48, 48], [4, 3, 48, 48]]
    """

    image: Inputs
    text: Texts
    index: Tensor
    bad: Sequence[BadRecord] = ()
    targets: tuple[Tensor, ...] = ()
    traffic: StorageTraffic = NO_TRAFFIC  # with remote storage, since the batch before of the same process

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """Joins consecutive parts of a batch. A part that is the whole batch remains as it is."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            image=parts[0].image.join([part.image for part in parts]),
            text=parts[0].text.join([part.text for part in parts]),
            index=torch.cat([part.index for part in parts]),
            bad=[record for part in parts for record in part.bad],
            targets=tuple(map(torch.cat, zip(*(part.targets for part in parts), strict=True))),
            traffic=reduce(StorageTraffic.plus, [part.traffic for part in parts]),
        )

    def pack(self, micro_batches: int) -> Batch:
        """Returns the whole batch with what the host has to find out about each micro-batch, if that is not done."""
        return replace(self, image=self.image.pack(micro_batches), text=self.text.pack(micro_batches))

    def pin_memory(self) -> Batch:
        """Returns the batch with all tensors that `to` moves in pinned memory. torch's thread that pins calls it."""
        targets = tuple(x.pin_memory() for x in self.targets)
        return replace(self, image=self.image.pin_memory(), text=self.text.pin_memory(), targets=targets)

    def to(self, device: torch.device) -> Batch:
        """Moves what a step reads on the device, without waiting for it, and makes pixels of images that are encoded.
        Raises DataError."""
        targets = tuple(moved(x, device) for x in self.targets)
        text = self.text.with_tensors(lambda x: moved(x, device))
        return replace(self, image=self.image.to(device), text=text, targets=targets)

    def record_stream(self, stream: torch.Stream) -> None:
        """Marks the tensors on the device as used by `stream`, so that their memory is not reused before its work."""
        self.image.record_stream(stream)
        self.text.record_stream(stream)
        for x in self.targets:
            x.record_stream(stream)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles small integer tensors by value: between processes each would take a file descriptor and a socket."""
        return _from_values, tuple(mapped(getattr(self, f.name), Tensor, _to_value) for f in fields(self))


def _to_value(x: Tensor) -> Any:
    integer = x.device.type == "cpu" and not x.is_floating_point() and x.is_contiguous()
    return x.numpy() if integer and x.nbytes <= _INLINE_BYTES and not x.is_shared() else x


def _from_values(*values: Any) -> Batch:
    return Batch(*(mapped(value, np.ndarray, torch.from_numpy) for value in values))
