"""Loaders: batches of this rank from positions of the sample stream. A batch depends on (seed, positions) alone."""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from clipx.data.order import SampleOrder
from clipx.data.source import BadRecord, BadSample, Sample, Source, prefetch_samples
from clipx.data.transform import decode, eval_transform, train_transform
from clipx.distributed.comm import Comm
from clipx.distributed.launch_env import check_cores
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

T = TypeVar("T")

_POLL_S = 5.0  # interval of a loader process's checks that its trainer is alive, as in torch
_END_S = 5.0  # time in which the end of a process whose connection broke is seen
_MAX_SUBSTITUTES = 100  # replacements tried for one sample of a batch before the run fails


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of b samples of this rank. image_b3SS uint8; tokens_bL int64; index_b int64, the indices in the source.

    Tokens and indices stay on the host, where reading them needs no synchronisation. `targets` are the rows that the
    objective compares with, one per sample: labels, or a teacher's embeddings.
    """

    image: Tensor
    tokens: Tensor
    index: Tensor
    bad: Sequence[BadRecord] = ()
    targets: tuple[Tensor, ...] = ()
    second_image: Tensor | None = None  # in the size of the SecondView; None if `image` already has that size
    second_tokens: Tensor | None = None  # None without a second view

    def without_texts(self) -> Batch:
        """Returns the batch with tokens [b, 0], for which a model computes no text embedding."""
        return replace(self, tokens=self.tokens[:, :0])

    def pin_memory(self) -> Batch:
        second = None if self.second_image is None else self.second_image.pin_memory()
        return replace(self, image=self.image.pin_memory(), second_image=second)

    def to(self, device: torch.device) -> Batch:
        targets = tuple(rows.to(device, non_blocking=True) for rows in self.targets)
        second = None if self.second_image is None else self.second_image.to(device, non_blocking=True)
        return replace(self, image=self.image.to(device, non_blocking=True), targets=targets, second_image=second)


@dataclass(frozen=True, slots=True)
class ImageView:
    """Image input of a model: squares of `size` pixels. Training crops have an area share within `crop_scale`."""

    size: int
    crop_scale: Sequence[float]
    max_pixels: int
    stretch: bool = False  # model.image.stretch; evaluation only


@dataclass(frozen=True, slots=True)
class SecondView:
    """Input of a second model, such as a teacher: the same crop at its size, the same caption in its tokens."""

    size: int
    tokenizer: Tokenizer


class TargetSource(Protocol):
    """Targets of each sample for the objective. Pickled to loader processes, so it must not hold open files."""

    def rows(self, index: int, sample: Sample, caption: str) -> tuple[Tensor, ...]:
        """Returns the target rows of a sample and its drawn caption. Raises BadSample if it has none."""


@dataclass(frozen=True)
class TrainBatches(Dataset["Batch | DataError"]):
    """Data set of batches by positions of the stream. A bad sample is replaced by one drawn from (seed, position)."""

    source: Source
    order: SampleOrder
    view: ImageView
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
            views_bSS3 = [_empty_pixels(len(positions), size) for size in self._sizes()]
            wanted = [self.order(position) for position in positions]
            prefetch_samples(self.source, wanted)
            for position, first, *outs_SS3 in zip(positions, wanted, *views_bSS3, strict=True):
                rng = random.Random(f"{self.seed}/{position}")
                index, caption, rows = self._draw(position, first, rng, bad, *outs_SS3)
                captions.append(caption)
                indices.append(index)
                targets.append(rows)
        except DataError as error:
            return error
        # channels-last memory: the layout of decoded pixels, and the one that convolutions prefer
        image, *others = (view_bSS3.permute(0, 3, 1, 2) for view_bSS3 in views_bSS3)
        return Batch(
            image=image,
            tokens=self.tokenizer(captions),
            index=torch.tensor(indices),
            bad=bad,
            targets=tuple(map(torch.stack, zip(*targets, strict=True))),
            second_image=others[0] if others else None,
            second_tokens=None if self.second is None else self.second.tokenizer(captions),
        )

    def _sizes(self) -> list[int]:
        """Returns the sizes of the views of each image."""
        second = [] if self.second is None or self.second.size == self.view.size else [self.second.size]
        return [self.view.size, *second]

    def _draw(
        self, position: int, index: int, rng: random.Random, bad: list[BadRecord], *outs_SS3: Tensor
    ) -> tuple[int, str, tuple[Tensor, ...]]:
        for _ in range(_MAX_SUBSTITUTES):
            try:
                sample = self.source.read(index)
                train_transform(sample.image, self.view.crop_scale, self.view.max_pixels, rng, *outs_SS3)
                caption = sample.draw_caption(rng)
                return index, caption, () if self.targets is None else self.targets.rows(index, sample, caption)
            except BadSample as error:
                bad.append(BadRecord(self.source.key(index), str(error)))
                index = self.order.substitute(position, rng)
        raise DataError(f"{_MAX_SUBSTITUTES} samples in a row are bad, the last {bad[-1].key}: {bad[-1].reason}")


class _PositionSampler(Sampler[range]):
    """Sampler of the positions that this rank reads in each step: its consecutive share of the global batch."""

    def __init__(self, samples: range, batch: int, rank: int, world: int) -> None:
        self.firsts = range(samples.start, samples.stop, batch)
        self.local, self.rank = batch // world, rank

    def __iter__(self) -> Iterator[range]:
        for first in self.firsts:
            yield range(first + self.rank * self.local, first + (self.rank + 1) * self.local)

    def __len__(self) -> int:
        return len(self.firsts)


class _BatchLoader(DataLoader[T]):
    """DataLoader over batches that raises the DataErrors returned by its dataset, and one if a loader process died."""

    def __init__(
        self, dataset: Dataset[T | DataError], batches: Iterable[range], workers: int, prefetch: int, pin: bool = False
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]  # __iter__ raises the errors
            batch_size=None,  # an item of the dataset is a batch
            sampler=batches,
            collate_fn=_identity,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            worker_init_fn=partial(_exit_with_trainer, os.getpid()),
            pin_memory=pin,
            # Otherwise each iterator draws from the default generator, which dropout uses.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        with _replaced_sigchld(None):  # without the handler that torch installs: see _replaced_sigchld
            batches = super().__iter__()
        while True:
            with _replaced_sigchld(lambda *_: _check_alive(batches)):
                try:
                    _check_alive(batches)
                    batch = next(batches)
                except StopIteration:
                    return
                except (RuntimeError, OSError, EOFError) as error:
                    # A connection to a process that is being killed breaks before its end can be seen.
                    _check_alive(batches, _END_S, error)
                    raise
            if isinstance(batch, DataError):
                raise batch
            yield batch


@contextlib.contextmanager
def _replaced_sigchld(handler: Callable[[int, FrameType | None], None] | None) -> Iterator[None]:
    """Replaces the handler of SIGCHLD by `handler`, if given, and restores it. No effect outside the main thread.

    Torch's handler raises the death of a loader process in any statement, also in one that writes a file or releases a
    lock. Here it is raised only while the trainer waits for a batch, where a message that ends half-way would block it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _check_alive(batches: object, wait_s: float = 0.0, cause: Exception | None = None) -> None:
    """Raises DataError if a loader process of the iterator has ended, or ends within `wait_s`."""
    workers = {worker.sentinel: worker for worker in getattr(batches, "_workers", ())}
    for ended in multiprocessing.connection.wait(workers, wait_s) if workers else ():
        worker = workers[ended]
        worker.join()
        if worker.exitcode or cause:  # with 0 all end after the last batch
            how = f"by {signal.Signals(-worker.exitcode).name}" if worker.exitcode < 0 else f"code {worker.exitcode}"
            raise DataError(
                f"a loader process of this rank died (pid {worker.pid}, {how}), usually killed for lack of memory: "
                "lower data.workers or data.prefetch, or give the job more memory"
            ) from cause


def _exit_with_trainer(trainer: int, _worker: int) -> None:
    """Ends a loader process when the process `trainer` ends, and ignores SIGTERM from any other process.

    SLURM may send SIGTERM to every process of a job that it ends. A loader process that ended on it would bring the
    trainer down before it has saved. torch's check of the parent process is not sufficient: if the trainer dies while
    the loader process starts, torch takes the adopting process for the trainer, and the loader process never ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        sender = None
        while sender != trainer and os.getppid() == trainer:
            received = signal.sigtimedwait({signal.SIGTERM}, _POLL_S)
            sender = received and received.si_pid
        os._exit(0)

    threading.Thread(target=wait, name="SIGTERM", daemon=True).start()


def _identity(batch: T) -> T:
    return batch


def check_workers(workers: int, comm: Comm) -> None:
    """Checks the number of loader processes against the cores of this rank: see check_cores. Raises ConfigError."""
    check_cores("data.workers", workers, comm.is_main)


def train_loader(
    source: Source,
    order: SampleOrder,
    view: ImageView,
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
) -> DataLoader[Batch]:
    """Returns a loader of this rank's batches for the stream positions `samples`, `batch` per step over all ranks.

    The start position does not affect the cost: nothing before it is read.
    """
    stream = TrainBatches(source, order, view, tokenizer, seed, second, targets)
    return _BatchLoader(stream, _PositionSampler(samples, batch, rank, world), workers, prefetch, pin)


def _empty_pixels(count: int, size: int) -> Tensor:
    """Returns an uninitialised [count, size, size, 3] uint8 tensor.

    In a loader process it is in memory shared with the trainer, so that the batch is passed on without a copy. Raises
    DataError if the shared memory is full.
    """
    shape = (count, size, size, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    try:
        shared = torch.UntypedStorage._new_shared(math.prod(shape))  # as in torch's default_collate
    except RuntimeError as error:
        raise DataError(
            f"the shared memory for a batch of {math.prod(shape) / 1e6:,.1f} MB cannot be allocated ({error}): each "
            "loader process keeps data.prefetch batches there; lower data.workers or data.prefetch, or give the "
            "machine or container more /dev/shm, e.g. with docker's --shm-size"
        ) from None
    return torch.empty(0, dtype=torch.uint8).set_(shared).view(shape)


# ---------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """The m good samples of one evaluation batch. image_m3SS uint8; index_m, their indices in the source."""

    image: Tensor
    index: Sequence[int]
    captions: Sequence[Sequence[str]]
    labels: Sequence[int | str | None]
    bad: Sequence[BadRecord]


@dataclass(frozen=True)
class _EvalBatches(Dataset["EvalBatch | DataError"]):
    source: Source
    view: ImageView

    def __getitem__(self, indices: range) -> EvalBatch | DataError:
        good: list[tuple[int, Sample, Tensor]] = []
        bad: list[BadRecord] = []
        try:
            prefetch_samples(self.source, indices)
            for index in indices:
                try:
                    sample = self.source.read(index)
                    image = decode(sample.image, self.view.max_pixels)
                    pixels = torch.tensor(eval_transform(image, self.view.size, self.view.stretch))
                except BadSample as error:
                    bad.append(BadRecord(self.source.key(index), str(error)))
                else:
                    good.append((index, sample, pixels))
        except DataError as error:
            return error
        stacked = default_collate([p for _, _, p in good]) if good else torch.empty(0, 0, 0, 3, dtype=torch.uint8)
        return EvalBatch(
            image=stacked.permute(0, 3, 1, 2),  # in channels-last memory
            index=[i for i, _, _ in good],
            captions=[s.captions for _, s, _ in good],
            labels=[s.label for _, s, _ in good],
            bad=bad,
        )


def eval_loader(
    source: Source, view: ImageView, *, batch: int, rank: int, world: int, workers: int, prefetch: int
) -> DataLoader[EvalBatch]:
    """Returns a loader of every world-th batch of the source, starting at batch `rank`.

    The batches do not depend on the number of ranks.
    """
    total = sum(source.sizes)
    batches = [range(start, min(start + batch, total)) for start in range(rank * batch, total, world * batch)]
    return eval_batch_loader(source, view, batches, workers, prefetch)


def eval_batch_loader(
    source: Source, view: ImageView, batches: Sequence[range], workers: int, prefetch: int
) -> DataLoader[EvalBatch]:
    """Returns a loader with one evaluation batch for each of the given index ranges of the source."""
    return _BatchLoader(_EvalBatches(source, view), batches, workers, prefetch)
