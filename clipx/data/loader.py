"""Loaders: batches of this rank from positions of the sample stream. A batch depends on (seed, positions) alone."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from clipx.data.batch import PART_SAMPLES, Batch
from clipx.data.images import Crops, Draw, ImageReader
from clipx.data.inputs import Inputs
from clipx.data.loader_pool import LoaderPool, load
from clipx.data.order import SampleOrder
from clipx.data.source import BadRecord, BadSample, Sample, Source, prefetch_samples
from clipx.data.texts import TextReader
from clipx.errors import DataError
from clipx.storage.remote import take_traffic

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
_MAX_SUBSTITUTES = 100  # replacements tried for one sample of a batch before the run fails


class TargetSource(Protocol):
    """Targets of each sample for the objective. Pickled to loader processes, so it must not hold open files."""

    def draw(self, index: int, draw: Draw) -> Draw:
        """Draws one of the crops of a sample that have targets, by the generator of `draw`. Raises BadSample. Returns
        `draw` itself if the targets do not depend on the crop."""

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        """Returns the target rows of a sample and its drawn caption and crop. Raises BadSample if it has none."""


@dataclass(frozen=True)
class TrainBatches(Dataset[Batch]):
    """Data set of batches by positions of the stream. A bad sample is replaced by one drawn from (seed, position)."""

    source: Source
    order: SampleOrder
    images: ImageReader
    texts: TextReader
    seed: int
    targets: TargetSource | None = None
    whole: int = 0  # samples of a batch that is not a part; such a batch is packed here
    micro_batches: int = 1

    def __getitem__(self, positions: range) -> Batch:
        """Returns the batch at positions of the stream. Raises DataError."""
        captions, indices, targets, bad = list[str](), [], [], list[BadRecord]()
        rows = self.images.allocate(len(positions))
        wanted = [self.order(position) for position in positions]
        prefetch_samples(self.source, wanted, *self.order.read_ahead(positions))
        for place, (position, first) in enumerate(zip(positions, wanted, strict=True)):
            index, drawn, found = self.sample(position, first, rows, place, bad)
            indices.append(index)
            captions += drawn
            targets.append(found)
        batch = Batch(
            image=self.images.inputs(rows),
            text=self.texts(captions, positions, self.seed),
            index=torch.tensor(indices),
            bad=bad,
            targets=tuple(map(torch.stack, zip(*targets, strict=True))),
            traffic=take_traffic(),
        )
        return batch.pack(self.micro_batches) if len(positions) == self.whole else batch

    def sample(
        self, position: int, index: int, rows: object, place: int, bad: list[BadRecord]
    ) -> tuple[int, list[str], tuple[Tensor, ...]]:
        """Reads sample `index` to its place in the rows, with the draws of a position of the stream. Returns index,
        captions and targets of the sample, or of its first usable substitute. Raises DataError if all substitutes are
        bad."""
        rng = random.Random(f"{self.seed}/{position}")
        for _ in range(_MAX_SUBSTITUTES):
            try:
                sample = self.source.read(index)
                draw = Draw(rng, f"{self.seed}/{position}/augment")
                if self.targets is not None:
                    draw = self.targets.draw(index, draw)
                self.images.read(sample.image, draw, rows, place)
                captions = self.texts.draw(sample, rng)
                targets = () if self.targets is None else self.targets.rows(index, sample, captions[0], draw.number)
                return index, captions, targets
            except BadSample as error:
                bad.append(BadRecord(self.source.key(index), str(error)))
                index = self.order.substitute(position, rng)
        raise DataError(f"{_MAX_SUBSTITUTES} samples in a row are bad, the last {bad[-1].key}: {bad[-1].reason}")


@dataclass(frozen=True)
class LoaderOptions:
    """Options of the loader of a rank, none of which changes the samples of the global batch."""

    batch: int  # samples of a step over all ranks
    rank: int = 0
    world: int = 1
    workers: int = 0  # loader processes; 0: this process makes the batches
    prefetch: int = 2  # batches that each process keeps ready
    device: torch.device = CPU
    micro_batches: int = 1
    part: int = PART_SAMPLES
    repeat: bool = False  # each batch is the first one of the stream
    pool: LoaderPool | None = None  # processes that make the batches, in place of new ones

    @property
    def local(self) -> int:
        """Samples of a step on this rank."""
        return self.batch // self.world

    @property
    def parts(self) -> int:
        """Number of parts of a rank's share of a batch."""
        return -(-self.local // self.part)

    @property
    def ready(self) -> int:
        """Number of parts that each process keeps ready: `prefetch`, or more if all processes together would otherwise
        keep less than `prefetch` batches."""
        return max(self.prefetch, -(-self.prefetch * self.parts // self.workers)) if self.workers else self.prefetch


def train_loader(stream: TrainBatches, samples: range, options: LoaderOptions) -> Iterator[Batch]:
    """Yields this rank's batches for the stream positions `samples`, on the device. The parts of a batch are moved as
    they arrive."""
    stream = replace(stream, whole=options.local, micro_batches=options.micro_batches)
    pin = options.device.type == "cuda"
    places = positions_of(samples, options)
    items = load(options.pool, stream, places, workers=options.workers, ready=options.ready, pin=pin)
    parts, begun = list[Batch](), False
    for part in items:
        if not begun and options.rank == 0 and part.image.remark:
            log.info("%s", part.image.remark)
        begun = True
        parts.append(part.to(options.device))
        del part  # frees the shared memory of what was copied
        if len(parts) == options.parts:
            batch = Batch.join(parts).pack(options.micro_batches).to(options.device)
            parts.clear()
            yield batch
            del batch


def positions_of(samples: range, options: LoaderOptions) -> Iterator[range]:
    """Yields the positions of each part that this rank reads: its consecutive share of each global batch, in parts of
    equal size up to one sample."""
    bounds = [i * options.local // options.parts for i in range(options.parts + 1)]
    for first in range(samples.start, samples.stop, options.batch):
        start = (0 if options.repeat else first) + options.rank * options.local
        for one, other in itertools.pairwise(bounds):
            yield range(start + one, start + other)


class DevicePrefetcher:
    """Iterator of the same batches. On CUDA `start_next` takes the next one, which the loader copies to the device, on
    a side stream: call it once the step on a batch is launched. An error of the loader is raised when its batch is
    asked for."""

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


# ---------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """The m good samples of one evaluation batch. index_m: their indices in the source. With V crops of each sample,
    image has the crops of the first sample, then those of the second, and boxes is [m, V, 4]."""

    image: Inputs
    index: Sequence[int]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[BadRecord]
    boxes: Tensor | None = None


@dataclass(frozen=True)
class _EvalBatches(Dataset[EvalBatch]):
    source: Source
    images: ImageReader
    crops: Crops | None = None

    def __getitem__(self, indices: range) -> EvalBatch:
        good: list[tuple[int, Sample, Tensor]] = []
        boxes = list[Tensor]()
        bad: list[BadRecord] = []
        prefetch_samples(self.source, indices)
        for index in indices:
            try:
                sample = self.source.read(index)
                if self.crops is None:
                    row = self.images.load_for_evaluation(sample.image)
                else:
                    row, box = self.crops.load(self.images, index, sample.image)
                    boxes.append(box)
            except BadSample as error:
                bad.append(BadRecord(self.source.key(index), str(error)))
            else:
                good.append((index, sample, row))
        rows = torch.stack([row for _, _, row in good]) if good else self.images.blank(0)
        return EvalBatch(
            image=self.images.inputs([rows.flatten(0, 1) if boxes else rows]),
            index=[i for i, _, _ in good],
            captions=[s.captions for _, s, _ in good],
            labels=[s.label for _, s, _ in good],
            bad=bad,
            boxes=torch.stack(boxes) if boxes else None,
        )


def rank_batches(total: int, batch: int, rank: int, world: int) -> list[range]:
    """Returns the indices of every world-th batch of `total` samples, starting at batch `rank`."""
    return [range(start, min(start + batch, total)) for start in range(rank * batch, total, world * batch)]


def eval_loader(
    source: Source,
    images: ImageReader,
    batches: Sequence[range],
    workers: int,
    prefetch: int,
    pool: LoaderPool | None = None,
    crops: Crops | None = None,
) -> Iterable[EvalBatch]:
    """Returns a loader with one batch for each index range of the source, of images as in evaluation or of `crops`.
    `pool`: processes that make the batches, in place of `workers` new ones."""
    return load(pool, _EvalBatches(source, images, crops), batches, workers=workers, ready=prefetch)
