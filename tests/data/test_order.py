"""The order of samples: every sample once an epoch, a pure function, and cheap anywhere in a large data set."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from clipx.data.order import Order

SIZES = [
    [1],
    [7],
    [0, 3, 0],
    [3, 0, 5, 1, 0, 0, 12],
    [10] * 7,
    [1] * 40,
    [100, 1, 50],
]
WINDOWS = [1, 2, 7, 10, 64, 10_000]


def epoch_of(order: Order, epoch: int) -> list[int]:
    return [order(epoch * order.samples + place) for place in range(order.samples)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_epoch_has_every_sample_exactly_once(sizes: list[int], window: int) -> None:
    order = Order(sizes, seed=5, window=window)
    for epoch in range(3):
        assert sorted(epoch_of(order, epoch)) == list(range(sum(sizes)))


@pytest.mark.parametrize("window", WINDOWS)
def test_any_position_gives_the_same_in_any_sequence_of_questions_and_any_object(window: int) -> None:
    sizes = [3, 0, 5, 1, 0, 0, 12]
    order = Order(sizes, seed=5, window=window)
    straight = [order(position) for position in range(100)]
    positions = np.random.default_rng(0).permutation(100)
    assert [order(int(p)) for p in positions] == [straight[p] for p in positions]
    assert [Order(sizes, seed=5, window=window)(p) for p in (99, 0, 57)] == [straight[p] for p in (99, 0, 57)]


def test_the_order_of_a_seed_stays_what_it_was() -> None:
    # A run can only be resumed or compared while this holds; a new NumPy that breaks it should be noticed here.
    order = Order([3, 4, 2], seed=1, window=5)
    assert epoch_of(order, 0) + epoch_of(order, 1) == [1, 2, 4, 0, 3, 6, 5, 8, 7, 5, 4, 6, 3, 0, 2, 7, 1, 8]


def test_epochs_and_seeds_differ() -> None:
    sizes = [20] * 5
    orders = [epoch_of(Order(sizes, seed, 30), epoch) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 9
    for one, other in pairwise(orders):  # about one place in 100 agrees by chance
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_a_window_mixes_the_samples_of_consecutive_shards_and_no_others() -> None:
    sizes = [13, 0, 29, 40, 7, 11]
    for window in (10, 32, 64):
        laid_end_to_end, shuffled = epoch_of(Order(sizes, 3, 1), 2), epoch_of(Order(sizes, 3, window), 2)
        assert laid_end_to_end != shuffled
        for start in range(0, 100, window):
            places = slice(start, start + window)
            assert sorted(shuffled[places]) == sorted(laid_end_to_end[places])


def test_shards_are_read_one_after_another_in_random_order() -> None:
    starts = np.cumsum([0, 13, 0, 29, 40, 7])
    orders = set()
    for epoch in range(20):
        samples = epoch_of(Order([13, 0, 29, 40, 7, 11], 3, 1), epoch)
        shards = np.searchsorted(starts, samples, side="right")
        visited = [int(s) for s, previous in zip(shards, [-1, *shards[:-1]], strict=True) if s != previous]
        assert len(visited) == len(set(visited)) == 5, "a shard is left only when it is read"
        orders.add(tuple(visited))
    assert len(orders) > 15


def test_all_orders_of_a_window_are_equally_likely() -> None:
    order = Order([4], seed=0, window=4)
    counts = Counter(tuple(epoch_of(order, epoch)) for epoch in range(4800))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_a_large_data_set_costs_little_memory_and_time_anywhere() -> None:
    shards, per_shard = 41_408, 10_000  # LAION-400M
    tracemalloc.start()
    start = time.perf_counter()
    order = Order([per_shard] * shards, seed=0, window=200_000)
    for position in (order.samples // 100, order.samples * 99 // 100, 5 * order.samples + 12_345):
        assert 0 <= order(position) < order.samples
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2  # 0.1 s on one core
    assert peak < 32 << 20
    start = time.perf_counter()
    for position in range(10_000):
        order(5 * order.samples + position)
    assert (time.perf_counter() - start) / 10_000 < 20e-6  # 0.4 us
