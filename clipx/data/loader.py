"""Positions of the stream -> batches on this rank. A batch depends on (seed, positions) alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clipx.data.order import Order
from clipx.data.source import Bad, BadSample, Sample, Source
from clipx.data.transform import Pixels, decode, eval_transform, train_transform
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

_TRIES = 100  # replacements for one place of a batch before the data is given up


@dataclass(frozen=True, slots=True)
class Batch:
    """b samples of this rank. image_b3SS uint8; tokens_bT int64; index_b int64, the samples' indices in the source."""

    image: Tensor
    tokens: Tensor
    index: Tensor
    bad: Sequence[Bad] = ()

    def pin_memory(self) -> Batch:
        return replace(
            self, image=self.image.pin_memory(), tokens=self.tokens.pin_memory(), index=self.index.pin_memory()
        )

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            image=self.image.to(device, non_blocking=True),
            tokens=self.tokens.to(device, non_blocking=True),
            index=self.index.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class View:
    """How a model wants its images: a square of `size` pixels, cropped at random within `crop_scale`."""

    size: int
    crop_scale: Sequence[float]
    max_pixels: int


@dataclass(frozen=True, slots=True)
class _Drawn:
    pixels: Pixels
    caption: str
    index: int
    bad: Sequence[Bad]


class _Stream(Dataset[_Drawn]):
    """The item at a position of the stream. A bad sample's place is taken by another, drawn from (seed, position)."""

    def __init__(self, source: Source, order: Order, view: View, seed: int) -> None:
        self.source, self.order, self.view, self.seed = source, order, view, seed

    def __getitem__(self, position: int) -> _Drawn:
        rng = random.Random(f"{self.seed}/{position}")
        bad: list[Bad] = []
        index = self.order(position)
        for _ in range(_TRIES):
            try:
                sample = self.source.read(index)
                image = decode(sample.image, self.view.max_pixels)
            except BadSample as error:
                bad.append(Bad(self.source.key(index), str(error)))
                index = rng.randrange(self.order.samples)
                continue
            pixels = train_transform(image, self.view.size, self.view.crop_scale, rng)
            return _Drawn(pixels, rng.choice(sample.captions), index, bad)
        raise DataError(f"{_TRIES} samples in a row are bad, the last {bad[-1].key}: {bad[-1].reason}")


class _Positions:
    """For each step the positions that this rank reads: its consecutive share of the global batch."""

    def __init__(self, start: int, stop: int, batch: int, rank: int, world: int) -> None:
        self.start, self.stop, self.batch, self.rank, self.world = start, stop, batch, rank, world

    def __iter__(self) -> Iterator[range]:
        local = self.batch // self.world
        for first in range(self.start, self.stop, self.batch):
            yield range(first + self.rank * local, first + (self.rank + 1) * local)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.batch)


@dataclass(frozen=True, slots=True)
class _Collate:
    tokenizer: Tokenizer

    def __call__(self, drawn: Sequence[_Drawn]) -> Batch:
        return Batch(
            image=_stack([d.pixels for d in drawn]),
            tokens=self.tokenizer([d.caption for d in drawn]),
            index=torch.tensor([d.index for d in drawn]),
            bad=[bad for d in drawn for bad in d.bad],
        )


def train_loader(
    source: Source,
    order: Order,
    view: View,
    tokenizer: Tokenizer,
    *,
    seed: int,
    samples: range,
    batch: int,
    rank: int,
    world: int,
    workers: int,
    prefetch: int,
    pin: bool,
) -> DataLoader[Batch]:
    """Batches of this rank for the stream's positions `samples`, in steps of `batch` over all ranks.

    Starting anywhere costs the same: nothing before the first position is read.
    """
    return DataLoader(
        _Stream(source, order, view, seed),  # type: ignore[arg-type]  # items are drawn; batches are what comes out
        batch_sampler=_Positions(samples.start, samples.stop, batch, rank, world),  # type: ignore[arg-type]
        collate_fn=_Collate(tokenizer),
        pin_memory=pin,
        **_worker_options(workers, prefetch),
    )


def _worker_options(workers: int, prefetch: int) -> dict[str, Any]:
    # A generator of its own: else making an iterator would draw from the one that dropout draws from.
    return {
        "num_workers": workers,
        "prefetch_factor": prefetch if workers else None,
        "generator": torch.Generator(),
    }


def _stack(pixels: Sequence[Pixels]) -> Tensor:
    """[b, 3, S, S] in channels-last memory, as decoders give pixels and convolutions want them."""
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


# ---------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """m good samples out of one evaluation batch. image_m3SS uint8; index_m their indices in the source."""

    image: Tensor
    index: Sequence[int]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[Bad]


class _Held(Dataset[tuple[int, Sample | None, Pixels | None, Bad | None]]):
    def __init__(self, source: Source, view: View) -> None:
        self.source, self.view = source, view

    def __getitem__(self, index: int) -> tuple[int, Sample | None, Pixels | None, Bad | None]:
        try:
            sample = self.source.read(index)
            pixels = eval_transform(decode(sample.image, self.view.max_pixels), self.view.size)
        except BadSample as error:
            return index, None, None, Bad(self.source.key(index), str(error))
        return index, replace(sample, image=b""), pixels, None


def _collate_held(items: Sequence[tuple[int, Sample | None, Pixels | None, Bad | None]]) -> EvalBatch:
    good = [(index, sample, pixels) for index, sample, pixels, _ in items if sample is not None and pixels is not None]
    pixels = [p for _, _, p in good]
    return EvalBatch(
        image=_stack(pixels) if pixels else torch.empty(0, 3, 0, 0, dtype=torch.uint8),
        index=[i for i, _, _ in good],
        captions=[s.captions for _, s, _ in good],
        labels=[s.label for _, s, _ in good],
        bad=[bad for _, _, _, bad in items if bad is not None],
    )


def eval_loader(
    source: Source, view: View, *, batch: int, rank: int, world: int, workers: int, prefetch: int
) -> DataLoader[EvalBatch]:
    """Every world-th batch of the source, from the rank-th: batches are the same however many ranks share them."""
    total = sum(source.sizes)
    starts = range(rank * batch, total, world * batch)
    return DataLoader(
        _Held(source, view),  # type: ignore[arg-type]
        batch_sampler=[list(range(start, min(start + batch, total))) for start in starts],
        collate_fn=_collate_held,
        **_worker_options(workers, prefetch),
    )
