"""Batches of training samples, and their parts: loader processes make at most PART_SAMPLES samples at a time.

Shape suffixes: b samples of a rank, S side of an image in pixels, F stored features, R rows of an image at its own
aspect ratio, X numbers of one of its patches, L length of a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from clipx.data.source import BadRecord
from clipx.storage.traffic import NO_TRAFFIC, Traffic

if TYPE_CHECKING:
    from clipx.data.encoded import EncodedImages
    from clipx.model.image_packing import ImagePacking, PackedImages
    from clipx.model.packer import ImagePacker, TextPacker

PART_SAMPLES = 512
"""Largest number of samples that a loader process makes at a time: 77 MB of images of 224 pixels."""

_INLINE_BYTES = 2**20


class BatchDecoder(Protocol):
    """Decoder of the images that loader processes leave to the device."""

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        """Returns the batch on the device, with all images in pixels. Raises DataError."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of b samples of this rank. image_b3SS uint8, image_bF float32 for stored features, or image_bRX uint8 for
    images at their own aspect ratio; tokens_bL int64; index_b int64, the indices in the source. With k captions of each
    sample, tokens are [k·b, L], sample by sample.

    Tokens and indices stay on the host, where reading them needs no synchronisation. `targets` are the rows that the
    objective compares with, one per sample: labels, or a teacher's embeddings. With data.decode=gpu a batch on the host
    has most images in `encoded`: `image` and `second_image` hold the others, in the order of the samples.
    """

    image: Tensor
    tokens: Tensor
    index: Tensor
    bad: Sequence[BadRecord] = ()
    targets: tuple[Tensor, ...] = ()
    second_image: Tensor | None = None  # in the size of the SecondView; None if `image` already has that size
    second_tokens: Tensor | None = None  # of the first caption of each sample; None without a second view
    packing: tuple[Any, ...] = ()  # packed texts of each micro-batch; without them the model takes `tokens`
    second_packing: tuple[Any, ...] = ()
    image_packing: tuple[ImagePacking, ...] = ()  # of the images of each micro-batch, at their own aspect ratio
    text_tokens: int = 0  # number of tokens in `packing`, see TextPacker.count
    captions: Tensor | None = None  # [b, k] int64, digests of the captions; None unless the objective compares them
    traffic: Traffic = NO_TRAFFIC  # with remote storage, since the batch before of the same process
    encoded: tuple[EncodedImages, ...] = ()  # of each part; without data.decode=gpu none
    decoder: BatchDecoder | None = None  # of `encoded`

    @property
    def image_tokens(self) -> int:
        """Number of tokens of the images in `image_packing`, without the padding to a multiple."""
        return sum(len(packing.tokens.flat_index_T) for packing in self.image_packing)

    def image_inputs(self, micro_batches: int) -> list[Tensor | PackedImages]:
        """Returns the images of each micro-batch, as the model takes them."""
        images = self.image.chunk(micro_batches)
        if not self.image_packing:
            return list(images)
        from clipx.model.image_packing import PackedImages

        return [PackedImages(*each) for each in zip(images, self.image_packing, strict=True)]

    @property
    def images(self) -> list[Tensor]:
        """`image`, and `second_image` if the batch has it."""
        return [self.image] if self.second_image is None else [self.image, self.second_image]

    @property
    def texts_per_sample(self) -> int:
        """k, the number of captions of each sample."""
        return len(self.tokens) // len(self.index)

    def texts(self, micro_batches: int) -> tuple[Any, ...]:
        """Returns the texts of each micro-batch, packed or as tokens."""
        return self.packing or text_chunks(self.tokens, self.texts_per_sample, micro_batches)

    def without_texts(self) -> Batch:
        """Returns the batch with tokens [b, 0], for which a model computes no text embedding."""
        return replace(self, tokens=self.tokens[:, :0], packing=(), text_tokens=0)

    def pin_memory(self) -> Batch:
        """Returns the batch with all tensors that `to` moves in pinned memory."""
        return self._with_inputs(lambda x: x.pin_memory() if x.numel() else x)

    def to(self, device: torch.device) -> Batch:
        """Moves all tensors but tokens and indices, without waiting for the device if they are pinned.

        Decodes the images that are encoded, see DeviceDecoder.
        """
        if self.decoder is not None:
            return self.decoder(self, device)
        return self._with_inputs(lambda x: x.to(device, non_blocking=True))

    def record_stream(self, stream: torch.Stream) -> None:
        """Marks the tensors on the device as used by `stream`, so that their memory is not reused before its work."""

        def mark(x: Tensor) -> Tensor:
            x.record_stream(stream)
            return x

        self._with_inputs(mark)

    def _with_inputs(self, call: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            image=call(self.image),
            targets=mapped(self.targets, Tensor, call),
            second_image=mapped(self.second_image, Tensor, call),
            packing=mapped(self.packing, Tensor, call),
            second_packing=mapped(self.second_packing, Tensor, call),
            image_packing=mapped(self.image_packing, Tensor, call),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles small integer tensors by value: between processes each would take a file descriptor and a socket."""
        return _from_values, tuple(mapped(getattr(self, f.name), Tensor, _to_value) for f in fields(self))


def text_chunks(tokens_bL: Tensor, each: int, micro_batches: int) -> tuple[Tensor, ...]:
    """Splits the texts of samples with `each` texts like the samples of a batch."""
    return tuple(chunk.flatten(0, 1) for chunk in _by_sample(tokens_bL, each).chunk(micro_batches))


def caption_digests(tokens_bL: Tensor, each: int) -> Tensor:
    """Returns a 64-bit digest of the tokens of each text, [b, each] int64: texts of equal tokens have equal digests."""
    rows = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in tokens_bL.numpy())
    return _by_sample(torch.from_numpy(np.frombuffer(b"".join(rows), np.int64).copy()), each)


def _by_sample(texts: Tensor, each: int) -> Tensor:
    return texts.view(len(texts) // each, each, *texts.shape[1:])  # not -1: a batch without texts has no elements


def mapped(value: Any, kind: type, call: Callable[[Any], Any]) -> Any:
    """Returns `value`, a dataclass or a tuple of any depth, with `call(x)` in place of each x of type `kind`."""
    if isinstance(value, kind):
        return call(value)
    if isinstance(value, tuple):
        return tuple(mapped(item, kind, call) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: mapped(getattr(value, f.name), kind, call) for f in fields(value)})
    return value


def _to_value(x: Tensor) -> Any:
    integer = x.device.type == "cpu" and not x.is_floating_point() and x.is_contiguous()
    return x.numpy() if integer and x.nbytes <= _INLINE_BYTES and not x.is_shared() else x


def _from_values(*values: Any) -> Batch:
    return Batch(*(mapped(value, np.ndarray, torch.from_numpy) for value in values))


@dataclass(frozen=True, slots=True)
class Packers:
    """Packs the texts of a batch for the model, the second texts for the second model, and images at their own aspect
    ratio, by micro-batch."""

    first: TextPacker | None = None  # None: the model takes tokens
    second: TextPacker | None = None
    micro_batches: int = 1
    image: ImagePacker | None = None  # None: the model takes images of one size

    def __call__(self, batch: Batch) -> Batch:
        images = () if self.image is None else batch.image.chunk(self.micro_batches)
        return replace(
            batch,
            image_packing=tuple(self.image(chunk) for chunk in images if self.image is not None),
            packing=self._packed(self.first, batch.tokens, batch.texts_per_sample),
            second_packing=self._packed(self.second, batch.second_tokens, each=1),
            text_tokens=batch.tokens.numel() if self.first is None else self.first.count(batch.tokens),
        )

    def _packed(self, packer: TextPacker | None, tokens_bL: Tensor | None, each: int) -> tuple[Any, ...]:
        if packer is None or tokens_bL is None:
            return ()
        return tuple(packer(chunk) for chunk in text_chunks(tokens_bL, each, self.micro_batches))


# ------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class PartRange:
    """Stream positions of a part of a batch, and its place: it begins at row `first` of `size` rows."""

    positions: range
    first: int
    size: int
    key: tuple[int, int]  # of the batch among all batches of the process


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive samples of a batch, from one loader process. A part that is the whole batch is packed there."""

    batch: Batch
    place: PartRange
    packers: Packers

    @classmethod
    def of(cls, batch: Batch, place: PartRange, packers: Packers) -> Part:
        return cls(packers(batch) if len(batch.index) == place.size else batch, place, packers)

    def join(self, pin: bool = False) -> JoinedBatch:
        """Adds the part to its batch, and returns that batch. `pin`: in pinned memory."""
        joined = _joined.get(self.place.key)
        if joined is None:
            _joined[self.place.key] = joined = JoinedBatch(self.place.size, self.packers, pin)
        joined.add(self)
        return joined

    def pin_memory(self) -> JoinedBatch:
        """Joins the part in pinned memory. torch's thread that pins memory calls it, in the order of completion."""
        return self.join(pin=True)


class JoinedBatch:
    """A batch of `size` samples whose parts arrive in any order.

    Images are copied on arrival, to free the shared memory that they arrive in: pixels to their rows, encoded images
    and the pixels beside them by part.
    """

    def __init__(self, size: int, packers: Packers, pin: bool) -> None:
        self.size, self.packers, self.pin = size, packers, pin
        self._parts: dict[int, Batch] = {}  # by their first row, without images
        self._images: list[Tensor] = []  # image and second image of the batch
        self._batch: Batch | None = None

    def add(self, part: Part) -> None:
        batch = part.batch
        if len(batch.index) < self.size:
            self._parts[part.place.first] = self._without_images(batch, part.place.first)
            if sum(len(part.index) for part in self._parts.values()) < self.size:
                return
            batch = self.packers(self._whole())
        self._batch = batch.pin_memory() if self.pin else batch

    def join(self) -> JoinedBatch:
        """Returns the batch itself, to which the thread that pins memory has added the part."""
        return self

    def take(self) -> Batch:
        """Returns the batch, of which all parts must have been added, and drops the reference to it."""
        batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    def _without_images(self, batch: Batch, first: int) -> Batch:
        """Copies the images of a part that begins at row `first`. Returns the part without memory of its images."""
        if batch.encoded:
            image, *others = [image.clone() for image in batch.images]
            encoded = tuple(part.moved(first) for part in batch.encoded)
            return replace(batch, image=image, second_image=others[0] if others else None, encoded=encoded)
        self._images = self._images or [_empty_like(image, self.size, self.pin) for image in batch.images]
        for whole, image in zip(self._images, batch.images, strict=True):
            whole[first : first + len(image)].copy_(image)
        return replace(batch, image=batch.image[:0].clone(), second_image=None)

    def _whole(self) -> Batch:
        parts = [self._parts[first] for first in sorted(self._parts)]
        second = [part.second_tokens for part in parts if part.second_tokens is not None]
        captions = [part.captions for part in parts if part.captions is not None]
        if parts[0].encoded:
            self._images = [torch.cat(images) for images in zip(*(part.images for part in parts), strict=True)]
        image, *others = self._images
        self._parts, self._images = {}, []
        return Batch(
            image=image,
            tokens=torch.cat([part.tokens for part in parts]),
            index=torch.cat([part.index for part in parts]),
            bad=[record for part in parts for record in part.bad],
            targets=tuple(map(torch.cat, zip(*(part.targets for part in parts), strict=True))),
            second_image=others[0] if others else None,
            second_tokens=torch.cat(second) if second else None,
            captions=torch.cat(captions) if captions else None,
            traffic=reduce(Traffic.plus, [part.traffic for part in parts]),
            encoded=tuple(images for part in parts for images in part.encoded),
        )


def _empty_like(image: Tensor, size: int, pin: bool) -> Tensor:
    """Returns uninitialised [size, 3, S, S] in channels-last memory, [size, F] for stored features, or [size, R, X]."""
    if image.ndim < 4:
        return torch.empty((size, *image.shape[1:]), dtype=image.dtype, pin_memory=pin)
    _, channels, height, width = image.shape
    empty = torch.empty((size, height, width, channels), dtype=image.dtype, pin_memory=pin)
    return empty.permute(0, 3, 1, 2)


_joined: WeakValueDictionary[tuple[int, int], JoinedBatch] = WeakValueDictionary()
"""The batches of this process that are being joined. The thread that pins memory receives parts alone."""
