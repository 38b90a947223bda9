"""The order of samples: a pure function of (seed, epoch, position).

An epoch visits the shards in random order; the samples of that sequence are shuffled within consecutive windows. So
samples are shuffled globally over shards and widely within a window, each is seen exactly once an epoch, nothing
depends on workers, ranks or timing, and starting at any position costs one window's permutation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Order:
    """The endless stream of sample indices for shards of the given sizes.

    Positions run on over epochs: position p is place p mod n of epoch p div n, n being the number of samples.
    Memory: 8 bytes for each sample of two windows, and 32 for each shard.
    """

    def __init__(self, sizes: Sequence[int], seed: int, window: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.samples = int(self.sizes.sum())
        self.seed = seed
        self.window = min(window, self.samples)
        self._shards: tuple[int, Indices, Indices] | None = None  # epoch, shard order, ends in that order
        self._windows: dict[tuple[int, int], Indices] = {}

    def __call__(self, position: int) -> int:
        """The index of the sample at a position of the stream."""
        epoch, place = divmod(position, self.samples)
        window, offset = divmod(place, self.window)
        indices = self._windows.get((epoch, window))
        if indices is None:
            indices = self._shuffled(epoch, window)
        return int(indices[offset])

    def _shuffled(self, epoch: int, window: int) -> Indices:
        """The samples of a window, in order. Kept for two windows: a batch may straddle them."""
        if len(self._windows) >= 2:
            self._windows.pop(next(iter(self._windows)))
        start = window * self.window
        length = min(self.window, self.samples - start)
        places = start + self._rng(epoch, 1 + window).permutation(length)
        self._windows[epoch, window] = indices = self._indices(epoch, places)
        return indices

    def _indices(self, epoch: int, places: Indices) -> Indices:
        """The samples at places of the shards laid end to end in the epoch's order."""
        if self._shards is None or self._shards[0] != epoch:
            shards = self._rng(epoch, 0).permutation(len(self.sizes))
            self._shards = (epoch, shards, np.cumsum(self.sizes[shards]))
        _, shards, ends = self._shards
        k = np.searchsorted(ends, places, side="right")
        last: Indices = (self.starts + self.sizes)[shards[k]]
        return last - (ends[k] - places)

    def _rng(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, epoch, purpose))))
