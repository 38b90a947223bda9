"""A pool makes the same batches as separate loader processes, for training and for evaluations between its steps."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from helpers.samples import Numbers
from torch.utils.data import Dataset

from clipx.data.batch import Batch
from clipx.data.loader import EvalBatch, eval_loader, train_loader
from clipx.data.loader_pool import LoaderPool, load
from clipx.data.order import Order
from clipx.data.views import ImageView
from clipx.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer(16)
VIEW = ImageView(size=12, crop_scale=[0.5, 1.0], max_pixels=10**6)
SOURCE = Numbers([17, 0, 40, 1, 30, 13], broken=frozenset({3, 8, 40}))  # 101 samples
ORDER = Order(SOURCE.sizes, seed=3, window=30)
WORKERS, READY = 2, 2


@dataclass(frozen=True)
class Squares(Dataset[int]):
    """Squares of numbers."""

    def __getitem__(self, number: int) -> int:
        return number * number


@pytest.fixture(scope="module")
def pool() -> Iterator[LoaderPool]:
    pool = LoaderPool(WORKERS, READY, False, [SOURCE, ORDER, TOKENIZER])
    yield pool
    pool.close()


def training(pool: LoaderPool | None, workers: int = WORKERS, part: int = 512) -> Iterator[Batch]:
    settings = {"batch": 12, "rank": 0, "world": 1, "workers": workers, "prefetch": 1, "pin": False, "part": part}
    return iter(
        train_loader(SOURCE, ORDER, VIEW, TOKENIZER, seed=3, samples=range(24, 144), pool=pool, **settings)  # type: ignore[arg-type]
    )


def evaluation(pool: LoaderPool | None, workers: int = WORKERS) -> Iterator[EvalBatch]:
    return iter(eval_loader(SOURCE, VIEW, batch=9, rank=0, world=1, workers=workers, prefetch=READY, pool=pool))


def numbers(pool: LoaderPool | None, items: range) -> Iterator[int]:
    return iter(load(pool, Squares(), items, workers=1, ready=READY))


@pytest.mark.parametrize("part", [512, 5])
def test_training_and_evaluations_share_the_processes_and_change_no_batch(pool: LoaderPool, part: int) -> None:
    expected = list(training(None, workers=0)), list(evaluation(None, workers=0))
    processes = {child.pid for child in multiprocessing.active_children()}
    found = []
    for step, batch in enumerate(training(pool, part=part)):
        found.append(batch)
        if step in (0, 4):
            if step:
                next(evaluation(pool))  # ends after its first batch
            with torch.inference_mode():
                evaluated = list(evaluation(pool))
            assert [one.index for one in evaluated] == [one.index for one in expected[1]]
            assert [one.bad for one in evaluated] == [one.bad for one in expected[1]]
            assert all(torch.equal(a.image, b.image) for a, b in zip(evaluated, expected[1], strict=True))
    assert len(found) == len(expected[0])
    assert not any(batch.image.is_inference() or batch.tokens.is_inference() for batch in found)
    for one, other in zip(found, expected[0], strict=True):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.index, other.index)
        assert list(one.bad) == list(other.bad)
    assert {child.pid for child in multiprocessing.active_children()} <= processes  # those of other tests may end


def test_items_requested_before_an_evaluation_stay_ready_up_to_the_limit(pool: LoaderPool) -> None:
    first = numbers(pool, range(100))
    assert next(first) == 0
    assert list(numbers(pool, range(40, 60))) == [n * n for n in range(40, 60)]
    (stream,) = pool._streams
    assert list(stream.ready)[:3] == [1, 4, 9]
    assert stream.in_flight + len(stream.ready) <= WORKERS * READY
    assert list(first) == [n * n for n in range(1, 100)]
    assert pool._streams == []


def test_close_ends_the_processes_and_the_state_of_the_generators_is_unchanged() -> None:
    before, state = set(multiprocessing.active_children()), torch.get_rng_state()
    own = LoaderPool(1, 1, False, [])
    assert list(numbers(own, range(3))) == [0, 1, 4]
    assert len(set(multiprocessing.active_children()) - before) == 1
    own.close()
    assert set(multiprocessing.active_children()) <= before
    assert torch.equal(torch.get_rng_state(), state)
