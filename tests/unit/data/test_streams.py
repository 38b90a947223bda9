"""The order of whole shards: each sample once per epoch, equal shares of the streams, shards read ahead and released."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.order import MixedOrder
from clipx.data.spec import Dataset, DataSpec, training_order
from clipx.data.streams import ShardSequence, StreamOrder, StreamPart, Streams, number_of_streams

SIZES = [10, 7, 0, 12, 9, 11, 8, 10, 3, 10, 10, 9]
SAMPLES = sum(SIZES)


@st.composite
def drawn_streams(draw: st.DrawFn) -> tuple[list[int], Streams]:
    """Draws (samples of each shard, their streams); each stream has samples."""
    count, share = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = [count, *draw(st.lists(st.integers(0, 20), max_size=15))]
    sequence, window = ShardSequence(sizes, draw(st.integers(0, 9))), draw(st.integers(1, 400))
    return sizes, Streams([StreamOrder(sequence, StreamPart(k, count), window) for k in range(count)], count * share)


@given(drawn_streams(), st.integers(0, 5))
def test_the_streams_together_read_each_sample_once_per_epoch(drawn: tuple[list[int], Streams], epoch: int) -> None:
    sizes, order = drawn
    assert order.samples == sum(sizes)
    read = [stream(epoch * stream.samples + k) for stream in order.orders for k in range(stream.samples)]
    assert sorted(read) == list(range(sum(sizes)))


@given(drawn_streams(), st.integers(0, 40))
def test_each_batch_has_an_equal_share_of_each_stream(drawn: tuple[list[int], Streams], step: int) -> None:
    _, order = drawn
    batch = [order(position) for position in range(order.batch * step, order.batch * (step + 1))]
    own = range(order.share * step, order.share * (step + 1))
    assert batch == [stream(place) for stream in order.orders for place in own]


@given(drawn_streams())
def test_read_ahead_names_the_shards_of_the_following_positions(drawn: tuple[list[int], Streams]) -> None:
    sizes, order = drawn
    ends, fetched = np.cumsum(sizes), set[int]()

    def shards(indices: Iterable[int]) -> set[int]:
        return {int(np.searchsorted(ends, index, side="right")) for index in indices}

    for step in range(60):
        positions = range(order.batch * step, order.batch * (step + 1))
        later, done = order.read_ahead(positions)
        assert not set(later) & set(done) or len(order.orders) > 1  # two parts may meet in a shard
        fetched = (fetched - shards(done)) | shards(later)
        assert shards(map(order, positions)) <= fetched


def test_a_shard_is_released_half_a_window_after_its_last_sample() -> None:
    """Loader processes read different batches: others may still read the window before."""
    order = StreamOrder(ShardSequence([10] * 200, 0), StreamPart(0, 1), 80)
    for start in (160, 240, 320):
        done = [order.read_ahead(range(start + place, start + place + 8)).done for place in range(0, 80, 8)]
        assert [len(shards) for shards in done] == [0] * 5 + [8] * 5


def test_a_resumed_run_keeps_its_streams_on_another_number_of_ranks() -> None:
    data, dataset = DataSpec(kind="x", name="x", batch_size=8), Dataset(Numbers(SIZES), None, whole_shards=True)
    first = training_order(data, dataset, 3, ranks=2)
    count = number_of_streams(first)
    assert number_of_streams(training_order(data, dataset, 3, ranks=1)) != count
    again = training_order(data, dataset, 3, ranks=1, streams=count)
    assert [again(position) for position in range(SAMPLES)] == [first(position) for position in range(SAMPLES)]


def test_a_mixture_keeps_its_shares_in_each_stream() -> None:
    sizes = {"a": [10] * 12, "b": [5] * 6}
    sequences = [ShardSequence(shards, 1, key=(k,)) for k, shards in enumerate(sizes.values())]
    totals = [sum(shards) for shards in sizes.values()]
    weights = [Fraction(3), Fraction(1)]
    mixed = [
        MixedOrder(
            list(sizes), [StreamOrder(s, StreamPart(k, 2), 20) for s in sequences], weights, random.Random(k), totals
        )
        for k in range(2)
    ]
    order = Streams(mixed, 8)
    found = [order(position) for position in range(1600)]
    assert set(found) == set(range(150))
    counts = order.source_counts(1600)
    assert {name: count.size for name, count in counts.items()} == {"a": 120, "b": 30}
    assert counts["a"].samples == sum(index < 120 for index in found)
    assert abs(counts["b"].samples - 400) <= 2
    later, _ = order.read_ahead(range(800, 808))
    assert {index < 120 for index in later} == {True, False}


def streams(count: int, window: int = 30, batch: int = 8, replacement: bool = False, seed: int = 3) -> Streams:
    sequence = ShardSequence(SIZES, seed, replacement)
    return Streams([StreamOrder(sequence, StreamPart(k, count), window) for k in range(count)], batch)


def test_seeds_and_epochs_differ() -> None:
    first = [streams(4)(position) for position in range(2 * SAMPLES)]
    assert first != [streams(4, seed=4)(position) for position in range(2 * SAMPLES)]
    assert first[:SAMPLES] != first[SAMPLES:]


def test_shards_are_released_and_only_the_stated_number_is_stored() -> None:
    sizes = [10] * 200
    order = Streams([StreamOrder(ShardSequence(sizes, 0), StreamPart(k, 2), 80) for k in range(2)], 8)
    fetched, most = set[int](), 0
    for step in range(250):
        later, done = order.read_ahead(range(8 * step, 8 * step + 8))
        fetched = (fetched - {index // 10 for index in done}) | {index // 10 for index in later}
        most = max(most, len(fetched))
    assert 8 <= most <= order.stored / 10
