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
    Memory: 8 bytes for each sample of a window and each shard.
    """

    def __init__(self, sizes: Sequence[int], seed: int, window: int) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.samples = int(self.sizes.sum())
        self.seed = seed
        self.window = min(window, self.samples)
        self._shards: tuple[int, Indices, Indices] | None = None  # epoch, shard order, ends in that order
        self._permuted: dict[tuple[int, int], Indices] = {}

    def __call__(self, position: int) -> int:
        """The index of the sample at a position of the stream."""
        epoch, place = divmod(position, self.samples)
        window, offset = divmod(place, self.window)
        return self._index(epoch, window * self.window + int(self._permutation(epoch, window)[offset]))

    def _index(self, epoch: int, place: int) -> int:
        """The sample at a place of the shards laid end to end in the epoch's order."""
        if self._shards is None or self._shards[0] != epoch:
            shards = self._rng(epoch, 0).permutation(len(self.sizes))
            self._shards = (epoch, shards, np.cumsum(self.sizes[shards]))
        _, shards, ends = self._shards
        k = int(np.searchsorted(ends, place, side="right"))
        shard = shards[k]
        return int(self.starts[shard] + place - (ends[k] - self.sizes[shard]))

    def _permutation(self, epoch: int, window: int) -> Indices:
        key = (epoch, window)
        if key not in self._permuted:
            if len(self._permuted) >= 2:  # a batch may straddle two windows
                self._permuted.pop(next(iter(self._permuted)))
            length = min(self.window, self.samples - window * self.window)
            self._permuted[key] = self._rng(epoch, 1 + window).permutation(length)
        return self._permuted[key]

    def _rng(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, epoch, purpose))))
