"""The order of samples: a pure function of (seed, epoch, position).

An epoch visits the shards in random order; the samples of that sequence are shuffled within consecutive windows. So
samples are shuffled globally over shards and widely within a window, each is seen exactly once an epoch, nothing
depends on workers, ranks or timing, and starting at any position costs one window's permutation.

Epochs run on without a gap, so a batch may hold the end of one and the start of the next. Of a run only whole batches
are trained: what is left of its last one is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_BLOCK = 4096  # positions drawn together where samples come with replacement


class SourceCount(NamedTuple):
    """How many samples were drawn from a source, and how many it has."""

    samples: int
    size: int


class SampleOrder(Protocol):
    """An endless stream of sample indices, known at any position."""

    @property
    def samples(self) -> int:
        """Samples there are; an epoch is as many positions."""

    def __call__(self, position: int) -> int:
        """The index of the sample at a position of the stream."""

    def substitute(self, position: int, rng: random.Random) -> int:
        """A sample drawn by `rng` that replaces the one at the position, which cannot be used."""

    def source_counts(self, position: int) -> Mapping[str, SourceCount]:
        """The samples that the positions before this one draw from each source, by name; {} of a single source."""


class Order:
    """The endless stream of sample indices for shards of the given sizes.

    Positions run on over epochs: position p is offset p mod n of epoch p div n, n being the number of samples. With
    `replacement` each position draws from all samples alike, whatever others drew. Streams of one seed that are told
    apart by `stream` have nothing to do with each other.
    Memory: 8 bytes for each sample of two windows, and 32 for each shard.
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
            indices = self._draw_block(window) if self.replacement else self._shuffled(epoch, window)
            if len(self._windows) >= 2:  # a batch may straddle two
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, window] = indices
        return int(indices[offset])

    def substitute(self, position: int, rng: random.Random) -> int:
        return rng.randrange(self.samples)

    def source_counts(self, position: int) -> Mapping[str, SourceCount]:
        return {}

    def _draw_block(self, block: int) -> Indices:
        """The samples at the positions of a block, each drawn by itself."""
        return self._rng(0, 1 + block).integers(self.samples, size=_BLOCK)

    def _shuffled(self, epoch: int, window: int) -> Indices:
        """The samples of a window, in order."""
        start = window * self.window
        length = min(self.window, self.samples - start)
        return self._indices(epoch, start + self._rng(epoch, 1 + window).permutation(length))

    def _indices(self, epoch: int, offsets: Indices) -> Indices:
        """The samples at offsets into the shards laid end to end in the epoch's order."""
        if self._shards is None or self._shards[0] != epoch:
            shards = self._rng(epoch, 0).permutation(len(self.sizes))
            self._shards = (epoch, shards, np.cumsum(self.sizes[shards]))
        _, shards, ends = self._shards
        k = np.searchsorted(ends, offsets, side="right")
        last: Indices = (self.starts + self.sizes)[shards[k]]
        return last - (ends[k] - offsets)

    def _rng(self, epoch: int, purpose: int) -> np.random.Generator:
        entropy = (self.seed, epoch, purpose, *self.stream)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
