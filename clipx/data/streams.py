"""The order of samples in shards that are read whole: several streams, each of which reads a few shards at a time.

The sequence of shards of an epoch is in random order, and cut into `count` parts of equal length. A stream reads one
part of each epoch, shuffled within its own windows, and gives the same number of consecutive samples to each batch.

    Streams(position) -> StreamOrder k (position in the stream) -> ShardSequence (shards of an epoch)
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clipx.data.order import Indices, ReadAhead, SampleOrder, SourceCount, generator

_NEXT_WINDOW = 0.25  # share of the substitutes from the next window: all samples of this one may be bad

_PER_RANK = 4  # most streams of a rank by default


def stream_count(batch: int, ranks: int, shards: int) -> int:
    """Returns the default number of streams of a run: up to four for each rank, in equal parts of its batch."""
    per_rank = [k for k in range(1, _PER_RANK + 1) if batch // ranks % k == 0 and k * ranks <= shards]
    if per_rank:
        return max(per_rank) * ranks
    return max(k for k in range(1, ranks + 1) if ranks % k == 0 and k <= max(1, shards))


def number_of_streams(order: SampleOrder) -> int | None:
    """Returns the number of streams of an order, for a checkpoint; None if it has none."""
    return len(order.orders) if isinstance(order, Streams) else None


class Streams(SampleOrder):
    """Endless stream of sample indices, read from `orders`, each of them the order of one stream. Of each batch the
    first share comes from the first stream, the second share from the second, and so on. The batch must be divisible by
    the number of streams."""

    def __init__(self, orders: Sequence[SampleOrder], batch: int) -> None:
        assert batch % len(orders) == 0
        self.orders, self.batch, self.share = orders, batch, batch // len(orders)
        self.samples = sum(order.samples for order in orders)
        self.stored = sum(order.stored for order in orders)

    def describe(self, ranks: int, sample_bytes: float) -> str:
        """Returns a line for the log. `sample_bytes`: of the shards, per sample."""
        count, stored = len(self.orders), min(self.stored, self.samples)
        parts = [f"whole shards in {count} streams", f"at most {stored:,} samples are stored"]
        if sample_bytes:
            parts[-1] += f", about {stored * sample_bytes / 1e9:.3g} GB over all ranks"
        if count % ranks:
            parts.append(f"ranks read the same shards, as {count} is no multiple of {ranks} ranks (data.streams)")
        return "; ".join(parts)

    def __call__(self, position: int) -> int:
        stream, local = self._locate(position)
        return self.orders[stream](local)

    def substitute(self, position: int, rng: random.Random) -> int:
        stream, local = self._locate(position)
        return self.orders[stream].substitute(local, rng)

    def source_counts(self, position: int) -> Mapping[str, SourceCount]:
        samples, sizes = Counter[str](), Counter[str]()
        for k, order in enumerate(self.orders):
            step, slot = divmod(position, self.batch)
            before = step * self.share + min(max(0, slot - k * self.share), self.share)
            for name, count in order.source_counts(before).items():
                samples[name] += count.samples
                sizes[name] += count.size
        return {name: SourceCount(samples[name], sizes[name]) for name in sizes}

    def read_ahead(self, positions: range) -> ReadAhead:
        found = ReadAhead()
        for stream, part in self._by_stream(positions):
            found = found.plus(self.orders[stream].read_ahead(part))
        return found

    def _locate(self, position: int) -> tuple[int, int]:
        """Returns (stream, position in the stream) of a position."""
        step, slot = divmod(position, self.batch)
        stream, offset = divmod(slot, self.share)
        return stream, step * self.share + offset

    def _by_stream(self, positions: range) -> Iterator[tuple[int, range]]:
        """Yields (stream, positions in the stream) of consecutive positions of a batch."""
        first = positions.start
        while first < positions.stop:
            stream, local = self._locate(first)
            count = min(self.share - local % self.share, positions.stop - first)
            yield stream, range(local, local + count)
            first += count


class ShardSequence:
    """The random sequence of shards of each epoch, shared by all streams of a source.

    With `replacement` a stream draws shards uniformly and independently instead of each shard once per epoch, until
    they have as many samples as its part of the data. The last one is used up to that number.
    """

    def __init__(self, sizes: Sequence[int], seed: int, replacement: bool = False, key: tuple[int, ...] = ()) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.samples = int(self.sizes.sum())
        self.shard = -(-self.samples // max(1, int(np.count_nonzero(self.sizes))))  # mean number of samples, rounded up
        self.seed, self.replacement, self.key = seed, replacement, key
        self._epochs: dict[tuple[int, ...], tuple[Indices, Indices]] = {}

    def epoch(self, epoch: int, part: StreamPart) -> tuple[Indices, Indices, int]:
        """Returns the sequence of shards, the end of each shard in it, and the offset at which the part begins."""
        purpose = (epoch, 0, 1 + part.number) if self.replacement else (epoch, 0)
        if purpose not in self._epochs:
            shards = self._drawn(purpose, part) if self.replacement else self.rng(*purpose).permutation(len(self.sizes))
            self._epochs = {k: v for k, v in self._epochs.items() if k[0] >= epoch - 1}
            self._epochs[purpose] = (shards, np.cumsum(self.sizes[shards]))
        return *self._epochs[purpose], 0 if self.replacement else part.first(self.samples)

    def rng(self, *purpose: int) -> np.random.Generator:
        return generator(self.seed, *purpose, *self.key)

    def _drawn(self, purpose: tuple[int, ...], part: StreamPart) -> Indices:
        rng, count, drawn, samples = self.rng(*purpose), -(-len(self.sizes) // part.count), list[Indices](), 0
        while samples < part.samples(self.samples):
            drawn.append(rng.integers(len(self.sizes), size=count))
            samples += int(self.sizes[drawn[-1]].sum())
        return np.concatenate(drawn)


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Part `number` of `count` equal parts of an epoch."""

    number: int
    count: int

    def first(self, samples: int) -> int:
        return self.number * samples // self.count

    def samples(self, samples: int) -> int:
        return StreamPart(self.number + 1, self.count).first(samples) - self.first(samples)


class _Window(NamedTuple):
    """Samples that are shuffled together: `length` from offset `start` of a part of an epoch."""

    epoch: int
    start: int
    length: int


class StreamOrder(SampleOrder):
    """Endless stream of the samples of one part of each epoch: position p is offset p mod n of epoch p div n.

    All streams together shuffle `window` samples, but each at least the samples of one shard. The first windows of an
    epoch are smaller: one shard, then as many samples as all windows before, so training starts when the first shard of
    each stream has arrived. A substitute for a bad sample comes from the same window or the next, which are stored, or
    soon.
    """

    def __init__(self, sequence: ShardSequence, part: StreamPart, window: int) -> None:
        self.sequence, self.part = sequence, part
        self.samples = part.samples(sequence.samples)
        self.window = min(self.samples, max(window // part.count, sequence.shard))
        self.bounds = [0]  # between the first windows of an epoch
        while (length := max(sequence.shard, self.bounds[-1])) < self.window:
            self.bounds.append(self.bounds[-1] + length)
        self.stored = 3 * (self.window + 2 * sequence.shard)
        self._shuffled: dict[_Window, Indices] = {}

    def __call__(self, position: int) -> int:
        window = self._window(position)
        return int(self._indices(window)[position - self._position(window)])

    def substitute(self, position: int, rng: random.Random) -> int:
        window = self._window(position)
        if rng.random() < _NEXT_WINDOW:
            window = self._window(self._position(window) + window.length)
        return int(self._indices(window)[rng.randrange(window.length)])

    def read_ahead(self, positions: range) -> ReadAhead:
        window, last = self._window(positions[0]), self._window(positions[-1])
        windows = dict.fromkeys([window, last, self._window(self._position(last) + last.length)])
        later = list(dict.fromkeys(index for one in windows for index in self._shards(one)))
        # Other processes may still read the window before: it is released in the second half of this one.
        start = self._position(window)
        if not start or positions[0] < start + window.length // 2:
            return ReadAhead(later)
        before = self._shards(self._window(start - 1))
        return ReadAhead(later, [index for index in before if index not in later])

    def _window(self, position: int) -> _Window:
        """Returns the window that contains a position."""
        epoch, offset = divmod(position, self.samples)
        last = self.bounds[-1]
        if offset < last:
            k = bisect_right(self.bounds, offset)
            start, end = self.bounds[k - 1], self.bounds[k]
        else:
            start = last + (offset - last) // self.window * self.window
            end = start + self.window
        return _Window(epoch, start, min(self.samples, end) - start)

    def _position(self, window: _Window) -> int:
        """Returns the first position of a window."""
        return window.epoch * self.samples + window.start

    def _indices(self, window: _Window) -> Indices:
        """Returns the samples of a window in shuffled order."""
        if window not in self._shuffled:
            rng = self.sequence.rng(window.epoch, 1 + window.start, 1 + self.part.number)
            offsets = window.start + rng.permutation(window.length)
            shards, ends, base = self.sequence.epoch(window.epoch, self.part)
            k = np.searchsorted(ends, base + offsets, side="right")
            last = (self.sequence.starts + self.sequence.sizes)[shards[k]]
            if len(self._shuffled) >= 3:  # a batch may span two windows, and substitutes come from the next
                self._shuffled.pop(next(iter(self._shuffled)))
            self._shuffled[window] = last - (ends[k] - base - offsets)
        return self._shuffled[window]

    def _shards(self, window: _Window) -> list[int]:
        """Returns the index of the first sample of each shard of a window, in the order of the epoch."""
        shards, ends, base = self.sequence.epoch(window.epoch, self.part)
        first = base + window.start
        i, j = np.searchsorted(ends, [first, first + window.length - 1], side="right")
        found = shards[i : j + 1]
        return [int(index) for index in self.sequence.starts[found[self.sequence.sizes[found] > 0]]]
