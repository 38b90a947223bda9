"""The order of samples: a pure function of (seed, epoch, position), whatever the workers, ranks and timing.

An epoch visits the shards in random order; the samples of that sequence are shuffled within consecutive windows. Epochs
follow each other without a gap. Shards that are read whole are read in streams instead: clipx/data/streams.py.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_BLOCK = 4096  # positions drawn together with replacement


class SourceCount(NamedTuple):
    """Number of samples drawn from a source, and the number of samples in it."""

    samples: int
    size: int


class ReadAhead(NamedTuple):
    """Whole shards to fetch and to release, each by the index of one of its samples."""

    later: Sequence[int] = ()  # shards that are read from now on, in the order of their first use
    done: Sequence[int] = ()  # shards that have been read and are not read again soon

    def plus(self, other: ReadAhead, start: int = 0) -> ReadAhead:
        """Returns these shards and those of a source whose samples begin at the index `start`."""
        return ReadAhead(*([*ours, *(start + i for i in more)] for ours, more in zip(self, other, strict=True)))


class SampleOrder(ABC):
    """Endless stream of sample indices with random access by position."""

    samples: int  # positions in an epoch
    stored: int = 0  # largest number of samples in whole shards that are stored at a time

    @abstractmethod
    def __call__(self, position: int) -> int:
        """Returns the index of the sample at a position of the stream."""

    @abstractmethod
    def substitute(self, position: int, rng: random.Random) -> int:
        """Draws by `rng` the index of a sample that replaces the unusable one at the position."""

    def source_counts(self, position: int) -> Mapping[str, SourceCount]:
        """Returns the samples drawn from each source before this position, by source name; {} for a single source."""
        return {}

    def read_ahead(self, positions: range) -> ReadAhead:
        """Returns the shards to fetch and to release where these positions, of one batch, are read; none by default."""
        return ReadAhead()


def generator(*entropy: int) -> np.random.Generator:
    """Returns a generator whose draws are a pure function of the numbers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class Order(SampleOrder):
    """Endless stream of sample indices for shards of the given sizes: position p is offset p mod n of epoch p div n.

    With `replacement` each position draws uniformly and independently from all n samples. Streams of one seed with
    different `stream` are independent. Memory: 8 bytes for each sample of two windows, and 32 for each shard.
    """

    def __init__(
        self, sizes: Sequence[int], seed: int, window: int, replacement: bool = False, stream: tuple[int, ...] = ()
    ) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.samples = int(self.sizes.sum())
        self.seed, self.stream = seed, stream
        self.replacement = replacement
        self.window = _BLOCK if replacement else min(window, self.samples)
        self._shards: tuple[int, Indices, Indices] | None = None  # epoch, shard order, ends in that order
        self._windows: dict[tuple[int, int], Indices] = {}

    def __call__(self, position: int) -> int:
        epoch, in_epoch = (0, position) if self.replacement else divmod(position, self.samples)
        window, offset = divmod(in_epoch, self.window)
        indices = self._windows.get((epoch, window))
        if indices is None:
            indices = (
                self._rng(0, 1 + window).integers(self.samples, size=_BLOCK)
                if self.replacement
                else self._shuffled(epoch, window)
            )
            if len(self._windows) >= 2:  # a batch may span two windows
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, window] = indices
        return int(indices[offset])

    def substitute(self, position: int, rng: random.Random) -> int:
        return rng.randrange(self.samples)

    def _shuffled(self, epoch: int, window: int) -> Indices:
        """Returns the samples of a window in shuffled order."""
        start = window * self.window
        length = min(self.window, self.samples - start)
        return self._indices(epoch, start + self._rng(epoch, 1 + window).permutation(length))

    def _indices(self, epoch: int, offsets: Indices) -> Indices:
        """Returns the samples at offsets into the concatenation of the shards in the epoch's order."""
        if self._shards is None or self._shards[0] != epoch:
            shards = self._rng(epoch, 0).permutation(len(self.sizes))
            self._shards = (epoch, shards, np.cumsum(self.sizes[shards]))
        _, shards, ends = self._shards
        k = np.searchsorted(ends, offsets, side="right")
        last: Indices = (self.starts + self.sizes)[shards[k]]
        return last - (ends[k] - offsets)

    def _rng(self, epoch: int, purpose: int) -> np.random.Generator:
        return generator(self.seed, epoch, purpose, *self.stream)


class WeightedOrder(SampleOrder):
    """Endless stream of sample indices, each drawn independently with a probability proportional to its weight.

    `cumulative`: running sums of the weights. A position is a pure function of (seed, stream). `samples` positions make
    an epoch. Memory: 8 bytes for each of two blocks of positions.
    """

    def __init__(
        self, cumulative: NDArray[np.float64], seed: int, stream: tuple[int, ...] = (), samples: int | None = None
    ) -> None:
        self.cumulative, self.seed, self.stream = cumulative, seed, stream
        self.samples = len(cumulative) if samples is None else samples
        self.total = float(cumulative[-1])
        self._blocks: dict[int, Indices] = {}

    def __call__(self, position: int) -> int:
        block, offset = divmod(position, _BLOCK)
        if block not in self._blocks:
            if len(self._blocks) >= 2:  # a batch may span two blocks
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[block] = self._at(generator(self.seed, 0, 1 + block, *self.stream).random(_BLOCK))
        return int(self._blocks[block][offset])

    def substitute(self, position: int, rng: random.Random) -> int:
        return int(self._at(np.array([rng.random()]))[0])

    def _at(self, shares: NDArray[np.float64]) -> Indices:
        """Returns the sample at each share of the sum of weights, in [0, 1)."""
        sums = np.minimum(shares * self.total, np.nextafter(self.total, 0))  # the product may be rounded up
        found: Indices = np.searchsorted(self.cumulative, sums, side="right").astype(np.int64)
        return found


# ----------------------------------------------------------------------------------------------------- mixtures


class MixedOrder(SampleOrder):
    """Endless stream of a mixture's sample indices. `orders` are the orders of the sources, in the order of `names`.

    The sources are the leaves of a binary tree. Of the first n positions of a node, floor(n·w + phase) belong to its
    left branch, w being the share of that branch in the node's weight. So the count of a source after any n positions
    differs from n times its share by at most log2 of the number of sources, and any position takes a few integer
    operations.
    """

    def __init__(
        self,
        names: Sequence[str],
        orders: Sequence[SampleOrder],
        weights: Sequence[Fraction],
        rng: random.Random,
        sizes: Sequence[int] = (),
    ) -> None:
        self.names, self.orders = names, orders
        self.sizes = [order.samples for order in orders]
        self.samples = sum(self.sizes)
        self.stored = sum(order.stored for order in orders)
        sizes = sizes or self.sizes  # of the sources, of which `orders` may be streams
        self._starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self._tree = _tree(range(len(orders)), weights, rng)

    def __call__(self, position: int) -> int:
        k, local = _locate(self._tree, position)
        return self._starts[k] + self.orders[k](local)

    def substitute(self, position: int, rng: random.Random) -> int:
        """Draws a substitute from the same source, so that bad samples do not change the shares."""
        k, local = _locate(self._tree, position)
        return self._starts[k] + self.orders[k].substitute(local, rng)

    def read_ahead(self, positions: range) -> ReadAhead:
        found, ends = ReadAhead(), dict(_counts(self._tree, positions.stop))
        for k, first in _counts(self._tree, positions.start):
            if first < ends[k]:
                found = found.plus(self.orders[k].read_ahead(range(first, ends[k])), self._starts[k])
        return found

    def source_counts(self, position: int) -> Mapping[str, SourceCount]:
        """Returns the counts by source. A nested mixture is counted as a whole and by its sources, `a` and `a.b`."""
        found: dict[str, SourceCount] = {}
        for k, count in _counts(self._tree, position):
            found[self.names[k]] = SourceCount(count, self.sizes[k])
            found |= {f"{self.names[k]}.{part}": drawn for part, drawn in self.orders[k].source_counts(count).items()}
        return found


@dataclass(frozen=True, slots=True)
class _Node:
    """Inner node: `left` gets (n · numerator + phase) // denominator of its first n positions, `right` the rest."""

    left: _Node | int  # an int is the index of a source
    right: _Node | int
    numerator: int
    denominator: int
    phase: int

    def count_left(self, position: int) -> int:
        """Returns the number of positions before this one that belong to `left`."""
        return (position * self.numerator + self.phase) // self.denominator


def _tree(sources: Sequence[int], weights: Sequence[Fraction], rng: random.Random) -> _Node | int:
    if len(sources) == 1:
        return sources[0]
    half = len(sources) // 2
    share = Fraction(sum(weights[:half]), sum(weights))
    phase = rng.randrange(share.denominator)
    left, right = _tree(sources[:half], weights[:half], rng), _tree(sources[half:], weights[half:], rng)
    return _Node(left, right, share.numerator, share.denominator, phase)


def _locate(tree: _Node | int, position: int) -> tuple[int, int]:
    """Returns (source, position in the stream of that source) of a position."""
    while not isinstance(tree, int):
        before = tree.count_left(position)
        if tree.count_left(position + 1) > before:
            tree, position = tree.left, before
        else:
            tree, position = tree.right, position - before
    return tree, position


def _counts(tree: _Node | int, position: int) -> Iterator[tuple[int, int]]:
    """Yields (source, number of positions before this one that belong to it)."""
    if isinstance(tree, int):
        yield tree, position
    else:
        before = tree.count_left(position)
        yield from _counts(tree.left, before)
        yield from _counts(tree.right, position - before)
