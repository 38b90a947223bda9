"""The sample order: every sample once per epoch, a pure function of the position."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from helpers.loading import train_batches
from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from clipx.data.images import PixelReader
from clipx.data.order import MixedOrder, Order, SampleOrder, WeightedOrder
from clipx.data.streams import ShardSequence, StreamOrder, StreamPart, Streams
from clipx.model.tokenizer import Tokenizer

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)
SEEDS = st.integers(0, 2**63 - 1)
WINDOWS = st.integers(1, 400)


def epoch_of(order: Order, epoch: int) -> list[int]:
    return [order(epoch * order.samples + place) for place in range(order.samples)]


@given(SIZES, SEEDS, WINDOWS, st.integers(0, 10**6))
def test_every_epoch_has_every_sample_exactly_once(sizes: list[int], seed: int, window: int, epoch: int) -> None:
    assert sorted(epoch_of(Order(sizes, seed, window), epoch)) == list(range(sum(sizes)))


@st.composite
def any_order(draw: st.DrawFn) -> Callable[[], SampleOrder]:
    """Draws a function that returns a new object of the same order: plain, weighted, in streams, or of a mixture."""
    sizes, seed, window = draw(SIZES), draw(SEEDS), draw(WINDOWS)
    count, other = draw(st.integers(1, 4)), draw(SIZES)
    weights = [Fraction(weight, 10) for weight in draw(st.lists(st.integers(1, 99), min_size=2, max_size=2))]

    def mixture() -> SampleOrder:
        orders = [Order(shards, seed, window, stream=(k,)) for k, shards in enumerate((sizes, other))]
        return MixedOrder(["a", "b"], orders, weights, random.Random(seed))

    def streams() -> SampleOrder:
        sequence = ShardSequence([count, *sizes], seed)
        return Streams([StreamOrder(sequence, StreamPart(k, count), window) for k in range(count)], 2 * count)

    return draw(
        st.sampled_from([
            lambda: Order(sizes, seed, window),
            lambda: Order(sizes, seed, window, replacement=True),
            lambda: WeightedOrder(np.cumsum(np.add(sizes, 0.5)), seed),
            mixture,
            streams,
        ])
    )  # fmt: skip


@given(any_order(), st.lists(st.integers(0, 1000), min_size=2, max_size=40))
def test_a_position_maps_to_the_same_sample_in_any_query_order_and_object(
    order: Callable[[], SampleOrder], positions: list[int]
) -> None:
    kept = order()
    assert [kept(position) for position in positions] == [order()(position) for position in positions]


@given(SIZES, SEEDS, WINDOWS, st.integers(0, 9))
def test_a_window_mixes_the_samples_of_consecutive_shards_and_no_others(
    sizes: list[int], seed: int, window: int, epoch: int
) -> None:
    sequential, shuffled = (epoch_of(Order(sizes, seed, length), epoch) for length in (1, window))
    for start in range(0, len(shuffled), window):
        assert sorted(shuffled[start : start + window]) == sorted(sequential[start : start + window])


def test_the_order_of_a_seed_is_frozen() -> None:
    # Resuming and comparing runs rely on this; the test detects a NumPy release that changes the order.
    order = Order([3, 4, 2], seed=1, window=5)
    assert epoch_of(order, 0) + epoch_of(order, 1) == [1, 2, 4, 0, 3, 6, 5, 8, 7, 5, 4, 6, 3, 0, 2, 7, 1, 8]


def test_shards_are_read_sequentially_in_random_order() -> None:
    starts = np.cumsum([0, 13, 0, 29, 40, 7])
    orders = set()
    for epoch in range(20):
        samples = epoch_of(Order([13, 0, 29, 40, 7, 11], 3, 1), epoch)
        shards = np.searchsorted(starts, samples, side="right")
        visited = [int(s) for s, previous in zip(shards, [-1, *shards[:-1]], strict=True) if s != previous]
        assert len(visited) == len(set(visited)) == 5, "each shard is read to its end before the next"
        orders.add(tuple(visited))
    assert len(orders) > 15


@given(st.data(), SIZES, SEEDS)
def test_ranks_and_parts_read_the_stream_of_the_order_from_any_position(
    data: st.DataObject, sizes: list[int], seed: int
) -> None:
    world, each, steps = (
        data.draw(st.integers(1, most), name) for name, most in (("world", 4), ("each", 6), ("steps", 3))
    )
    start, part = data.draw(st.integers(0, 100), "start"), data.draw(st.integers(1, 8), "part")
    batch, order = world * each, Order(sizes, seed, 16)
    samples, images = range(start, start + steps * batch), PixelReader((4,), [1.0, 1.0], 10**6)
    ranks = [
        train_batches(Numbers(sizes), order, images, Tokenizer(8), samples, batch, rank=rank, world=world, part=part)
        for rank in range(world)
    ]
    stream = [index for parts in zip(*ranks, strict=True) for one in parts for index in one.index.tolist()]
    assert stream == [order(position) for position in samples]


def test_epochs_and_seeds_differ() -> None:
    sizes = [20] * 5
    orders = [epoch_of(Order(sizes, seed, 30), epoch) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 9
    for one, other in pairwise(orders):  # about 1 position in 100 agrees by chance
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_all_orders_of_a_window_are_equally_likely() -> None:
    order = Order([4], seed=0, window=4)
    counts = Counter(tuple(epoch_of(order, epoch)) for epoch in range(4800))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_draws_with_replacement_are_uniform_and_independent() -> None:
    order = Order([13, 0, 29, 8], 5, 16, replacement=True)
    drawn = [order(position) for position in range(50_000)]
    assert stats.chisquare(np.bincount(drawn, minlength=50)).pvalue > 1e-3
    pairs = Counter(pairwise(drawn))
    pvalue = stats.chisquare([pairs[a, b] for a in range(50) for b in range(50)]).pvalue
    assert pvalue > 1e-3, "consecutive draws are independent"
    missing = [len(set(range(50)) - set(drawn[start : start + 50])) / 50 for start in range(0, 50_000, 50)]
    assert np.mean(missing) == pytest.approx((1 - 1 / 50) ** 50, abs=0.01)


def test_the_draws_of_a_seed_are_frozen() -> None:
    order, other = (Order([13, 0, 29, 8], seed, 16, replacement=True) for seed in (5, 6))
    frozen = [21, 0, 22, 15, 20, 6, 47, 5, 39, 39, 8, 49]
    assert [order(position) for position in range(12)] == frozen, "runs stay resumable"
    assert [order(position) for position in range(99)] != [other(position) for position in range(99)]
