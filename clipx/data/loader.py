"""Loaders: batches of this rank from positions of the sample stream. A batch depends on (seed, positions) alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from clipx.data.batch import PART_SAMPLES, Batch, JoinedBatch, Packers, Part, PartRange
from clipx.data.loader_pool import LoaderPool, load
from clipx.data.order import SampleOrder
from clipx.data.source import BadRecord, BadSample, Sample, Source, prefetch_samples
from clipx.data.views import View, shared_rows
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import check_cores
from clipx.errors import DataError
from clipx.model.packer import TextPacker
from clipx.model.tokenizer import Tokenizer
from clipx.storage.traffic import take_traffic

_MAX_SUBSTITUTES = 100  # replacements tried for one sample of a batch before the run fails


@dataclass(frozen=True, slots=True)
class SecondView:
    """Input of a second model, such as a teacher: the same crop at its size, the same caption in its tokens."""

    size: int
    tokenizer: Tokenizer
    packer: TextPacker | None = None  # None: the second model takes tokens


class TargetSource(Protocol):
    """Targets of each sample for the objective. Pickled to loader processes, so it must not hold open files."""

    def rows(self, index: int, sample: Sample, caption: str) -> tuple[Tensor, ...]:
        """Returns the target rows of a sample and its drawn caption. Raises BadSample if it has none."""


@dataclass(frozen=True)
class TrainBatches(Dataset["Batch | DataError"]):
    """Data set of batches by positions of the stream. A bad sample is replaced by one drawn from (seed, position)."""

    source: Source
    order: SampleOrder
    view: View
    tokenizer: Tokenizer
    seed: int
    second: SecondView | None = None
    targets: TargetSource | None = None

    def __getitem__(self, positions: range) -> Batch | DataError:
        """Returns the batch, or a DataError for the main process to raise.

        torch would replace the message of an exception raised here by a stack trace.
        """
        captions, indices, targets, bad = [], [], [], list[BadRecord]()
        try:
            views = self.view.allocate(len(positions), None if self.second is None else self.second.size)
            wanted = [self.order(position) for position in positions]
            prefetch_samples(self.source, wanted, *self.order.read_ahead(positions))
            for position, first, *outs in zip(positions, wanted, *views, strict=True):
                index, caption, rows = self.draw(position, first, bad, *outs)
                captions.append(caption)
                indices.append(index)
                targets.append(rows)
            image, *others = map(self.view.batch, map(shared_rows, views))
        except DataError as error:
            return error
        return Batch(
            image=image,
            tokens=self.tokenizer(captions),
            index=torch.tensor(indices),
            bad=bad,
            targets=tuple(map(torch.stack, zip(*targets, strict=True))),
            second_image=others[0] if others else None,
            second_tokens=None if self.second is None else self.second.tokenizer(captions),
            traffic=take_traffic(),
        )

    def rng(self, position: int) -> random.Random:
        """Returns the generator of the crop and the caption at a position."""
        return random.Random(f"{self.seed}/{position}")

    def draw(
        self, position: int, index: int, bad: list[BadRecord], *outs: Tensor
    ) -> tuple[int, str, tuple[Tensor, ...]]:
        """Reads sample `index` into its row of each allocated tensor, with the draws of a position of the stream.

        Returns (index, caption, target rows) of the sample, or of its first usable substitute. Appends the bad ones to
        `bad`. Raises DataError if all substitutes are bad.
        """
        rng = self.rng(position)
        for _ in range(_MAX_SUBSTITUTES):
            try:
                sample = self.source.read(index)
                self.view.load(sample.image, rng, *outs)
                caption = sample.draw_caption(rng)
                return index, caption, () if self.targets is None else self.targets.rows(index, sample, caption)
            except BadSample as error:
                bad.append(BadRecord(self.source.key(index), str(error)))
                index = self.order.substitute(position, rng)
        raise DataError(f"{_MAX_SUBSTITUTES} samples in a row are bad, the last {bad[-1].key}: {bad[-1].reason}")


@dataclass(frozen=True)
class _Parts(Dataset["Part | DataError"]):
    """Data set of the parts of batches."""

    stream: TrainBatches
    packers: Packers

    def __getitem__(self, place: PartRange) -> Part | DataError:
        batch = self.stream[place.positions]
        return batch if isinstance(batch, DataError) else Part.of(batch, place, self.packers)


class _PartSampler(Sampler[PartRange]):
    """Sampler of the positions that this rank reads in each step: its consecutive share of the global batch, in parts
    of equal size up to one sample. With `repeat` each step reads the positions of the first step of the stream."""

    def __init__(self, samples: range, batch: int, rank: int, world: int, part: int, repeat: bool = False) -> None:
        self.firsts = range(samples.start, samples.stop, batch)
        self.repeat = repeat
        self.local, self.rank = batch // world, rank
        self.parts = parts_of(self.local, part)
        self.bounds = [i * self.local // self.parts for i in range(self.parts + 1)]

    def __iter__(self) -> Iterator[PartRange]:
        number = next(_iterations)
        for step, first in enumerate(self.firsts):
            first = 0 if self.repeat else first
            positions = range(first + self.rank * self.local, first + (self.rank + 1) * self.local)
            for start, stop in itertools.pairwise(self.bounds):
                yield PartRange(positions[start:stop], start, self.local, (number, step))

    def __len__(self) -> int:
        return len(self.firsts) * self.parts


def parts_of(samples: int, part: int = PART_SAMPLES) -> int:
    """Returns the number of parts of a rank's share of a batch."""
    return -(-samples // part)


_iterations = itertools.count()


class TrainLoader:
    """Loader of this rank's batches. Each batch is joined from its parts, in pinned memory with `pin`."""

    def __init__(
        self, parts: _Parts, sampler: _PartSampler, workers: int, prefetch: int, pin: bool, pool: LoaderPool | None
    ) -> None:
        self.sampler = sampler
        ready = parts_ready(sampler.parts, workers, prefetch)
        self.items: Iterable[Part | JoinedBatch] = load(pool, parts, sampler, workers=workers, ready=ready, pin=pin)

    def __iter__(self) -> Iterator[Batch]:
        missing = self.sampler.parts
        for item in self.items:
            joined = item.join()
            del item  # frees the shared memory of the part
            missing -= 1
            if not missing:
                missing = self.sampler.parts
                yield joined.take()

    def __len__(self) -> int:
        return len(self.sampler.firsts)


def parts_ready(parts: int, workers: int, prefetch: int) -> int:
    """Returns the number of parts that each process keeps ready, for batches of `parts` parts.

    It is `prefetch`, or more if all processes together would otherwise keep less than `prefetch` batches.
    """
    return max(prefetch, -(-prefetch * parts // workers)) if workers else prefetch


def check_workers(workers: int, comm: Comm) -> None:
    """Checks the number of loader processes against the cores of this rank: see check_cores. Raises ConfigError."""
    check_cores("data.workers", workers, comm.is_main)


def train_loader(
    source: Source,
    order: SampleOrder,
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
    second: SecondView | None = None,
    targets: TargetSource | None = None,
    packer: TextPacker | None = None,
    micro_batches: int = 1,
    part: int = PART_SAMPLES,
    repeat: bool = False,
    pool: LoaderPool | None = None,
) -> TrainLoader:
    """Returns a loader of this rank's batches for the stream positions `samples`, `batch` per step over all ranks.

    The start position does not affect the cost: nothing before it is read. The batches do not depend on the size of
    their parts, nor their samples on `packer` and `micro_batches`: see Batch.packing. `repeat`: each of them is the
    first batch of the stream. `pool`: processes that make the batches, in place of new ones.
    """
    stream = TrainBatches(source, order, view, tokenizer, seed, second, targets)
    packers = Packers(packer, None if second is None else second.packer, micro_batches)
    sampler = _PartSampler(samples, batch, rank, world, part, repeat)
    return TrainLoader(_Parts(stream, packers), sampler, workers, prefetch, pin, pool)


# ---------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """The m good samples of one evaluation batch. index_m: their indices in the source.

    image_m3SS uint8, or image_mF float32 for stored features.
    """

    image: Tensor
    index: Sequence[int]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[BadRecord]


@dataclass(frozen=True)
class _EvalBatches(Dataset["EvalBatch | DataError"]):
    source: Source
    view: View

    def __getitem__(self, indices: range) -> EvalBatch | DataError:
        good: list[tuple[int, Sample, Tensor]] = []
        bad: list[BadRecord] = []
        try:
            prefetch_samples(self.source, indices)
            for index in indices:
                try:
                    sample = self.source.read(index)
                    row = self.view.load_for_evaluation(sample.image)
                except BadSample as error:
                    bad.append(BadRecord(self.source.key(index), str(error)))
                else:
                    good.append((index, sample, row))
        except DataError as error:
            return error
        rows = default_collate([row for _, _, row in good]) if good else self.view.allocate(0)[0]
        return EvalBatch(
            image=self.view.batch(rows),
            index=[i for i, _, _ in good],
            captions=[s.captions for _, s, _ in good],
            labels=[s.label for _, s, _ in good],
            bad=bad,
        )


def eval_loader(
    source: Source,
    view: View,
    *,
    batch: int,
    rank: int,
    world: int,
    workers: int,
    prefetch: int,
    pool: LoaderPool | None = None,
) -> Iterable[EvalBatch]:
    """Returns a loader of every world-th batch of the source, starting at batch `rank`.

    The batches do not depend on the number of ranks. `pool`: processes that make them, in place of `workers` new ones.
    """
    total = sum(source.sizes)
    batches = [range(start, min(start + batch, total)) for start in range(rank * batch, total, world * batch)]
    return eval_batch_loader(source, view, batches, workers, prefetch, pool)


def eval_batch_loader(
    source: Source, view: View, batches: Sequence[range], workers: int, prefetch: int, pool: LoaderPool | None = None
) -> Iterable[EvalBatch]:
    """Returns a loader with one evaluation batch for each of the given index ranges of the source."""
    return load(pool, _EvalBatches(source, view), batches, workers=workers, ready=prefetch)
