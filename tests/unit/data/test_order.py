"""The sample order: every sample once per epoch, a pure function of the position, cheap at any position."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from helpers.runs import VIT, compose, small
from helpers.samples import Numbers
from scipy import stats

from clipx.data.loader import train_loader
from clipx.data.order import Order
from clipx.data.views import ImageView
from clipx.model.tokenizer import Tokenizer
from clipx.trainer.trainer import Trainer

SIZES = [[1], [7], [0, 3, 0], [3, 0, 5, 1, 0, 0, 12], [10] * 7, [1] * 40, [100, 1, 50]]
WINDOWS = [1, 2, 7, 10, 64, 10_000]


def epoch_of(order: Order, epoch: int) -> list[int]:
    return [order(epoch * order.samples + place) for place in range(order.samples)]


def test_every_epoch_has_every_sample_exactly_once() -> None:
    for sizes, window in product(SIZES, WINDOWS):
        order = Order(sizes, seed=5, window=window)
        for epoch in range(3):
            assert sorted(epoch_of(order, epoch)) == list(range(sum(sizes))), (sizes, window, epoch)


def test_a_position_maps_to_the_same_sample_in_any_query_order_and_object() -> None:
    sizes = [3, 0, 5, 1, 0, 0, 12]
    for window in WINDOWS:
        order = Order(sizes, seed=5, window=window)
        straight = [order(position) for position in range(100)]
        positions = np.random.default_rng(0).permutation(100)
        assert [order(int(p)) for p in positions] == [straight[p] for p in positions], window
        assert [Order(sizes, 5, window)(p) for p in (99, 0, 57)] == [straight[p] for p in (99, 0, 57)], window


def test_the_order_of_a_seed_is_frozen() -> None:
    # Resuming and comparing runs rely on this; the test detects a NumPy release that changes the order.
    order = Order([3, 4, 2], seed=1, window=5)
    assert epoch_of(order, 0) + epoch_of(order, 1) == [1, 2, 4, 0, 3, 6, 5, 8, 7, 5, 4, 6, 3, 0, 2, 7, 1, 8]


def test_epochs_and_seeds_differ() -> None:
    sizes = [20] * 5
    orders = [epoch_of(Order(sizes, seed, 30), epoch) for seed in (0, 1, 2**62) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 9
    for one, other in pairwise(orders):  # about 1 position in 100 agrees by chance
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_a_window_mixes_the_samples_of_consecutive_shards_and_no_others() -> None:
    sizes = [13, 0, 29, 40, 7, 11]
    for window in (10, 32, 64):
        sequential, shuffled = epoch_of(Order(sizes, 3, 1), 2), epoch_of(Order(sizes, 3, window), 2)
        assert sequential != shuffled
        for start in range(0, 100, window):
            places = slice(start, start + window)
            assert sorted(shuffled[places]) == sorted(sequential[places])


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


def test_all_orders_of_a_window_are_equally_likely() -> None:
    order = Order([4], seed=0, window=4)
    counts = Counter(tuple(epoch_of(order, epoch)) for epoch in range(4800))
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


# ----------------------------------------------------------------------------- ranks, workers and partial batches


# Uneven shards, a single shard and two shards, with up to twelve readers.
# Uneven shards, a single shard and two shards, with up to twelve readers.
# Uneven shards, a single shard and two shards, with up to four readers.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("sizes", "world", "workers"),
    [([7, 0, 1, 22, 6, 11], 1, 3), ([7, 0, 1, 22, 6, 11], 3, 1), ([47], 4, 0), ([40, 7], 4, 0)],
    ids=str,
)
def test_epochs_continue_across_batches_and_have_every_sample_once(sizes: list[int], world: int, workers: int) -> None:
    """47 samples in batches of 12: the epoch is not a multiple of the batch, so some batches span two epochs."""
    order = Order(sizes, 5, 16)
    ranks = []
    for rank in range(world):
        loader = train_loader(
            Numbers(sizes), order, ImageView(4, [1.0, 1.0], 10**6), Tokenizer(8),
            seed=5, samples=range(144), batch=12, rank=rank, world=world, workers=workers, prefetch=2, pin=False,
        )  # fmt: skip
        ranks.append([batch.index.tolist() for batch in loader])
    stream = [index for parts in zip(*ranks, strict=True) for part in parts for index in part]
    assert stream == [order(position) for position in range(144)]
    for epoch in range(3):
        assert sorted(stream[47 * epoch : 47 * (epoch + 1)]) == list(range(47))


def test_only_a_partial_last_step_of_a_run_is_dropped(tmp_path: Path) -> None:
    trainer = Trainer(small(tmp_path / "run", *VIT, "data.samples=36", "duration=3ep"))  # 108 samples in batches of 32
    trainer.fit()
    assert (trainer.samples_seen, trainer.steps_done) == (96, 3)


# -------------------------------------------------------------------------------------------- with replacement


def test_draws_with_replacement_are_uniform_and_independent() -> None:
    order = Order([13, 0, 29, 8], 5, 16, replacement=True)
    drawn = [order(position) for position in range(50_000)]
    assert stats.chisquare(np.bincount(drawn, minlength=50)).pvalue > 1e-3
    pairs = Counter(pairwise(drawn))
    pvalue = stats.chisquare([pairs[a, b] for a in range(50) for b in range(50)]).pvalue
    assert pvalue > 1e-3, "consecutive draws are independent"
    missing = [len(set(range(50)) - set(drawn[start : start + 50])) / 50 for start in range(0, 50_000, 50)]
    assert np.mean(missing) == pytest.approx((1 - 1 / 50) ** 50, abs=0.01)


def test_draws_with_replacement_are_a_pure_function_of_the_position() -> None:
    order, other = (Order([13, 0, 29, 8], 5, 16, replacement=True) for _ in range(2))
    straight = [order(position) for position in range(1000)]
    positions = np.random.default_rng(0).permutation(1000)
    assert [other(int(p)) for p in positions] == [straight[p] for p in positions]
    frozen = [21, 0, 22, 15, 20, 6, 47, 5, 39, 39, 8, 49]
    assert straight[:12] == frozen, "the draws of a seed are frozen: runs stay resumable"
    assert straight != [Order([50], 6, 16, replacement=True)(position) for position in range(1000)]


def test_a_run_with_replacement_repeats_samples_within_an_epoch(tmp_path: Path) -> None:
    spec = small(tmp_path / "run", "data.replacement=true")
    order = spec.data.order(Numbers([100]), spec.seed)
    assert len({order(position) for position in range(100)}) < 80
    whole = compose().data.order(Numbers([100]), 0)
    assert len({whole(position) for position in range(100)}) == 100
