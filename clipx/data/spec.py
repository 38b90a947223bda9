"""Data: what a run reads. Each kind of data is one file with its spec; all of them become a `Source`.

spec.open() -> Dataset(train: Source, held_out: Source, classes)
Source + Order -> Loader -> Batch          the order is a pure function of (seed, epoch, position)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from clipx.config.registry import MISSING
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.data.order import SampleOrder
    from clipx.data.source import Source
    from clipx.distributed.comm import Comm

PILLOW_LIMIT = 178_956_970  # pixels


@dataclass(frozen=True, slots=True)
class Classes:
    """What zero-shot classification asks: `names` in the order of the labels, and templates with a `{}` for the name.

    `subsets` are named groups of labels that are also scored among themselves, such as held-out combinations.
    """

    names: Sequence[str]
    templates: Sequence[str]
    subsets: dict[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dataset:
    """The sources of a run. `held_out` is None where nothing is held out; `classes` where the data names none."""

    train: Source
    held_out: Source | None
    classes: Classes | None = None
    published: int | None = None  # samples that the data is said to have, where that is known


@dataclass(kw_only=True, slots=True)
class DataSpec:
    """Options of every kind of data."""

    indexed: ClassVar[bool] = True  # whether each sample has a number of its own, its place in the data set

    kind: str = MISSING
    name: str = MISSING  # shown in run names and reports
    batch_size: int = 256  # samples in one optimizer step, over all ranks and micro-batches
    micro_batches: int = 1  # forward passes that a rank's share of the batch is cut into; the gradient stays exact
    workers: int = 2  # loader processes per rank; 0 loads in the training process
    prefetch: int = 2  # batches each worker keeps ready
    shuffle_window: int = 200_000  # samples shuffled together, from shards in random order; 8 bytes each per worker
    crop_scale: list[float] = field(default_factory=lambda: [0.9, 1.0])  # share of the image's area, at random
    max_pixels: int = 89_000_000  # larger images are bad samples: a few bytes can unpack to gigabytes
    max_bad_share: float = 0.1  # the run fails when a larger share of the samples cannot be used
    min_caption_chars: int = 0  # a training sample without a caption this long is a bad one, as unusable ones are
    min_side: int = 0  # a training sample whose image has a side of fewer pixels is a bad one
    replacement: bool = False  # each sample is drawn from all alike, instead of each exactly once an epoch
    weight: float = 1.0  # as a source of a mixture: its share of each batch, relative to the other sources' weights

    def __post_init__(self) -> None:
        require(
            self.batch_size >= 2, f"data.batch_size={self.batch_size} must be at least 2: one sample has no negatives"
        )
        require(self.micro_batches >= 1, f"data.micro_batches={self.micro_batches} must be at least 1")
        require(
            self.batch_size % self.micro_batches == 0,
            f"data.batch_size={self.batch_size} is not divisible by data.micro_batches={self.micro_batches}: "
            f"use a batch of {nearest_multiples(self.batch_size, self.micro_batches)}, or "
            f"{nearest_divisors(self.batch_size, self.micro_batches)} micro-batches",
        )
        require(
            self.workers >= 0, f"data.workers={self.workers} is negative: give 0 (load in the training process) or more"
        )
        require(self.prefetch >= 1, f"data.prefetch={self.prefetch} must be at least 1 batch")
        require(self.shuffle_window >= 1, f"data.shuffle_window={self.shuffle_window} must be at least 1 sample")
        require("/" not in self.name, f"data.name={self.name} is part of a file's name, and so holds no /: use - or _")
        low, high = (*self.crop_scale, 0, 0)[:2]
        require(
            len(self.crop_scale) == 2 and 0 < low <= high <= 1,
            f"data.crop_scale={self.crop_scale} must be [low, high] with 0 < low ≤ high ≤ 1, e.g. [0.9,1.0]",
        )
        require(
            1 <= self.max_pixels <= PILLOW_LIMIT,
            f"data.max_pixels={self.max_pixels} must lie in [1, {PILLOW_LIMIT}]: Pillow opens no larger image",
        )
        for name, limit in (("min_caption_chars", self.min_caption_chars), ("min_side", self.min_side)):
            require(limit >= 0, f"data.{name}={limit} is negative: give 0 for no limit, or more")
        require(0 <= self.max_bad_share <= 1, f"data.max_bad_share={self.max_bad_share} must lie in [0, 1]")

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError where so many ranks cannot share a batch evenly."""
        split = f"{ranks} ranks" + (f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")
        fix = nearest_multiples(self.batch_size, ranks * self.micro_batches)
        require(
            self.batch_size % (ranks * self.micro_batches) == 0,
            f"data.batch_size={self.batch_size} is not divisible by {split}: use {fix}",
        )

    @property
    def published(self) -> int | None:
        """Samples that the data is said to have, where that is known before it is opened."""
        return None

    def open(self) -> Dataset:
        """Opens, and where needed first writes or indexes, the data. Raises ConfigError or DataError."""
        raise NotImplementedError

    def open_for_evaluation(self) -> Dataset:
        """Opens it as a set that nothing is trained on: what is said to be held out is evaluated, or else all of it."""
        return self.open()

    def order(self, train: Source, seed: int, stream: tuple[int, ...] = ()) -> SampleOrder:
        """The order in which the training source, as it was opened, is read."""
        from clipx.data.order import Order

        return Order(train.sizes, seed, self.shuffle_window, self.replacement, stream)


def non_default_values(data: DataSpec, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(key, value) of those that have another value than their default."""
    for f in dataclasses.fields(data):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.name in keys and (value := getattr(data, f.name)) != default:
            yield f.name, value


def open_data(data: DataSpec) -> Dataset:
    """`data.open()`, with its training samples held to the limits that every kind has. Held-out ones stay as they are:
    what a model is measured by does not change with what it learns from."""
    opened = data.open()
    if not (data.min_caption_chars or data.min_side):
        return opened
    from clipx.data.filter import Filtered

    return replace(opened, train=Filtered(opened.train, data.min_caption_chars, data.min_side))


def open_on_all_ranks(data: DataSpec, comm: Comm, open_one: Callable[[DataSpec], Dataset] = open_data) -> Dataset:
    """Rank 0 writes or indexes what is not there yet; then the others open it too. An error is every rank's."""
    opened: list[Dataset] = []
    comm.run_on_main(lambda: opened.append(open_one(data)))
    return opened[0] if opened else open_one(data)


def all_held_out(dataset: Dataset) -> Dataset:
    """All that is opened to be trained on, to be evaluated."""
    return replace(dataset, held_out=dataset.train)


def nearest_divisors(value: int, near: int) -> str:
    """The divisors of `value` next to `near`, in words for an error message."""
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    below, above = [d for d in divisors if d < near], [d for d in divisors if d > near]
    return " or ".join(str(d) for d in (*below[-1:], *above[:1]))


def nearest_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` next to `value`, in words for an error message."""
    below, above = value // factor * factor, -(-value // factor) * factor
    return str(above) if below == 0 else f"{below} or {above}"
