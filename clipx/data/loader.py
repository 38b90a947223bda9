"""Positions of the stream -> batches on this rank. A batch depends on (seed, positions) alone."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from clipx.data.order import SampleOrder
from clipx.data.source import Bad, BadSample, Sample, Source, expect
from clipx.data.transform import decode, eval_transform, train_transform
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

T = TypeVar("T")

_LOOK_S = 5.0  # between a loader process's looks at whether its trainer lives, as torch has it
_TRIES = 100  # replacements for one place of a batch before the data is given up


@dataclass(frozen=True, slots=True)
class Batch:
    """b samples of this rank. image_b3SS uint8; tokens_bL int64; index_b int64, the samples' indices in the source.

    Tokens and indices stay on the host, where looking at them costs nothing. `given` is what an objective wants
    besides, as a teacher's embeddings or labels, one row a sample.
    """

    image: Tensor
    tokens: Tensor
    index: Tensor
    bad: Sequence[Bad] = ()
    given: tuple[Tensor, ...] = ()

    def pin_memory(self) -> Batch:
        return replace(self, image=self.image.pin_memory())

    def to(self, device: torch.device) -> Batch:
        given = tuple(rows.to(device, non_blocking=True) for rows in self.given)
        return replace(self, image=self.image.to(device, non_blocking=True), given=given)


@dataclass(frozen=True, slots=True)
class View:
    """How a model wants its images: a square of `size` pixels, cropped at random within `crop_scale`."""

    size: int
    crop_scale: Sequence[float]
    max_pixels: int


class _Stream(Dataset["Batch | DataError"]):
    """The batch at positions of the stream. A bad sample's place is taken by another, drawn from (seed, position)."""

    def __init__(self, source: Source, order: SampleOrder, view: View, tokenizer: Tokenizer, seed: int) -> None:
        self.source, self.order, self.view, self.tokenizer, self.seed = source, order, view, tokenizer, seed

    def __getitem__(self, positions: range) -> Batch | DataError:
        """An error is handed over, to be raised in the main process: on its way it would become a stack trace."""
        captions, indices, bad = [], [], list[Bad]()
        try:
            image_bSS3 = _new_pixels(len(positions), self.view.size)
            wanted = [self.order(position) for position in positions]
            expect(self.source, wanted)
            for position, first, out_SS3 in zip(positions, wanted, image_bSS3, strict=True):
                rng = random.Random(f"{self.seed}/{position}")
                index, sample = self._draw(position, first, rng, bad, out_SS3)
                captions.append(sample.draw(rng))
                indices.append(index)
        except DataError as error:
            return error
        # channels-last memory, as decoders give pixels and convolutions want them
        return Batch(image_bSS3.permute(0, 3, 1, 2), self.tokenizer(captions), torch.tensor(indices), bad)

    def _draw(
        self, position: int, index: int, rng: random.Random, bad: list[Bad], out_SS3: Tensor
    ) -> tuple[int, Sample]:
        for _ in range(_TRIES):
            try:
                sample = self.source.read(index)
                train_transform(sample.image, self.view.crop_scale, self.view.max_pixels, rng, out_SS3)
                return index, sample
            except BadSample as error:
                bad.append(Bad(self.source.key(index), str(error)))
                index = self.order.another(position, rng)
        raise DataError(f"{_TRIES} samples in a row are bad, the last {bad[-1].key}: {bad[-1].reason}")


class _Positions(Sampler[range]):
    """For each step the positions that this rank reads: its consecutive share of the global batch."""

    def __init__(self, samples: range, batch: int, rank: int, world: int) -> None:
        self.firsts = range(samples.start, samples.stop, batch)
        self.local, self.rank = batch // world, rank

    def __iter__(self) -> Iterator[range]:
        for first in self.firsts:
            yield range(first + self.rank * self.local, first + (self.rank + 1) * self.local)

    def __len__(self) -> int:
        return len(self.firsts)


class _Loader(DataLoader[T]):
    """A DataLoader of whole batches that raises the errors it is handed."""

    def __init__(
        self, dataset: Dataset[T | DataError], batches: Iterable[range], workers: int, prefetch: int, pin: bool = False
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]  # errors end here
            batch_size=None,  # an item of the dataset is a batch
            sampler=batches,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            worker_init_fn=partial(_end_with_the_trainer, os.getpid()),
            pin_memory=pin,
            generator=torch.Generator(),  # of its own: else each iterator would draw from dropout's
        )

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, DataError):
                raise batch
            yield batch


def _end_with_the_trainer(trainer: int, _worker: int) -> None:
    """In a loader process: it ends when the process `trainer` does, and of SIGTERM only that process's counts.

    SLURM may send one to every process of a job that it ends. A loader process that ended by it would take the trainer
    along before that has saved. torch's own look at the parent takes for the trainer whatever adopted a process whose
    trainer died while it started, and would never end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        sender = None
        while sender != trainer and os.getppid() == trainer:
            told = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
            sender = told and told.si_pid
        os._exit(0)

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()


@contextlib.contextmanager
def deaths_told() -> Iterator[None]:
    """Turns torch's notice that a loader process died, which may interrupt anything, into a DataError."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"a loader process of this rank died ({' '.join(str(error).split())}): killed for memory, as a rule; lower "
            "data.workers or data.prefetch, or give the job more memory"
        ) from error


def _as_it_is(batch: T) -> T:
    return batch


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
) -> DataLoader[Batch]:
    """Batches of this rank for the stream's positions `samples`, in steps of `batch` over all ranks.

    Starting anywhere costs the same: nothing before the first position is read.
    """
    stream = _Stream(source, order, view, tokenizer, seed)
    return _Loader(stream, _Positions(samples, batch, rank, world), workers, prefetch, pin)


def _new_pixels(count: int, size: int) -> Tensor:
    """[count, size, size, 3] uint8; in a loader process, of the memory that it shares with the trainer: what is
    written here is handed over without a copy. Raises DataError where there is no room for it.
    """
    shape = (count, size, size, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    try:
        shared = torch.UntypedStorage._new_shared(math.prod(shape))  # as torch's default_collate has it
    except RuntimeError as error:
        raise DataError(
            f"the shared memory for a batch of {math.prod(shape) / 1e6:,.1f} MB cannot be had ({error}): each of "
            "data.workers holds data.prefetch of them; lower these, or give the machine or container more /dev/shm, as "
            "by docker's --shm-size"
        ) from None
    return torch.empty(0, dtype=torch.uint8).set_(shared).view(shape)


# ---------------------------------------------------------------------------------------------- evaluation


def _stack(pixels: list[Tensor]) -> Tensor:
    """[m, 3, S, S] in channels-last memory."""
    stacked: Tensor = default_collate(pixels)
    return stacked.permute(0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """m good samples out of one evaluation batch. image_m3SS uint8; index_m their indices in the source."""

    image: Tensor
    index: Sequence[int]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[Bad]


class _Held(Dataset["EvalBatch | DataError"]):
    def __init__(self, source: Source, view: View) -> None:
        self.source, self.view = source, view

    def __getitem__(self, indices: range) -> EvalBatch | DataError:
        good: list[tuple[int, Sample, Tensor]] = []
        bad: list[Bad] = []
        try:
            expect(self.source, indices)
            for index in indices:
                try:
                    sample = self.source.read(index)
                    pixels = torch.tensor(eval_transform(decode(sample.image, self.view.max_pixels), self.view.size))
                except BadSample as error:
                    bad.append(Bad(self.source.key(index), str(error)))
                else:
                    good.append((index, sample, pixels))
        except DataError as error:
            return error
        return EvalBatch(
            image=_stack([p for _, _, p in good]) if good else torch.empty(0, 3, 0, 0, dtype=torch.uint8),
            index=[i for i, _, _ in good],
            captions=[s.captions for _, s, _ in good],
            labels=[s.label for _, s, _ in good],
            bad=bad,
        )


def eval_loader(
    source: Source, view: View, *, batch: int, rank: int, world: int, workers: int, prefetch: int
) -> DataLoader[EvalBatch]:
    """Every world-th batch of the source, from the rank-th: batches are the same however many ranks share them."""
    total = sum(source.sizes)
    batches = [range(start, min(start + batch, total)) for start in range(rank * batch, total, world * batch)]
    return _Loader(_Held(source, view), batches, workers, prefetch)
