"""Batches depend only on seed and positions, not on workers, ranks, the start or earlier bad samples."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.loading import train_batches
from helpers.samples import Numbers, encode, jpeg, picture
from helpers.waiting import wait_until
from torch.utils.data import Dataset

from clipx.data.augment_spec import AugmentSpec
from clipx.data.batch import Batch
from clipx.data.images import PixelReader
from clipx.data.loader import EvalBatch, eval_loader, rank_batches
from clipx.data.loader_pool import LoaderPool, load
from clipx.data.order import Order
from clipx.data.source import Source
from clipx.data.transform import decode, eval_transform
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer

TOKENIZER = Tokenizer(16)
VIEW = PixelReader((12,), crop_scale=[0.5, 1.0], max_pixels=10**6)
BROKEN = frozenset({3, 8, 9, 40, 71})
SOURCE = Numbers([17, 0, 40, 1, 30, 13], broken=BROKEN)  # 101 samples
UNEVEN = Numbers([5, 1, 0, 9])


def batches(source: Source, start: int, stop: int, **options: Any) -> list[Batch]:
    return list(stream(source, start, stop, **options))


def stream(source: Source, start: int, stop: int, **options: Any) -> Iterator[Batch]:
    order = Order(source.sizes, seed=3, window=options.pop("window", 30))
    return train_batches(source, order, VIEW, TOKENIZER, range(start, stop), 12, seed=3, **options)


def assert_same(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.image.rows[0], other.image.rows[0])
        assert torch.equal(one.text.rows[0], other.text.rows[0])
        assert torch.equal(one.index, other.index)
        assert list(one.bad) == list(other.bad)


@pytest.fixture(scope="module")
def reference_run() -> list[Batch]:
    """The batches of 240 samples (more than two epochs), uninterrupted, in one process."""
    return batches(SOURCE, 0, 240)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_batches_are_the_same_for_any_number_of_workers(reference_run: list[Batch]) -> None:
    for workers in (0, 1, 3):
        assert_same(batches(SOURCE, 0, 240, workers=workers), reference_run)


def test_batches_of_the_ranks_concatenate_to_the_global_batch(reference_run: list[Batch]) -> None:
    ranks = [batches(SOURCE, 0, 240, rank=rank, world=4, workers=rank % 2) for rank in range(4)]
    for *parts, whole in zip(*ranks, reference_run, strict=True):
        assert_same([Batch.join(parts)], [whole])


def test_starting_at_any_step_equals_an_uninterrupted_run(reference_run: list[Batch]) -> None:
    for step in (7, 18):
        assert_same(batches(SOURCE, 12 * step, 240), reference_run[step:])


def test_all_captions_of_a_sample_are_drawn_and_views_differ_between_epochs() -> None:
    seen: dict[int, set[bytes]] = {}
    tokens: dict[int, set[bytes]] = {}
    for batch in batches(UNEVEN, 0, 15 * 12):
        for image, row, index in zip(batch.image.rows[0], batch.text.rows[0], batch.index.tolist(), strict=True):
            seen.setdefault(index, set()).add(image.numpy().tobytes())
            tokens.setdefault(index, set()).add(row.numpy().tobytes())
    assert set(seen) == set(range(15))
    assert min(len(views) for views in seen.values()) >= 10  # of 12 epochs
    assert {len(texts) for texts in tokens.values()} == {2}


def test_every_sample_is_seen_once_per_epoch_with_uneven_shards() -> None:
    source = Numbers([7, 0, 1, 22, 6])  # 36 = 3 steps of 12
    for world in (1, 3):
        seen = [b.index for rank in range(world) for b in batches(source, 36, 72, rank=rank, world=world)]
        assert sorted(torch.cat(seen).tolist()) == list(range(36)), f"{world=}"


# ------------------------------------------------------------------------------------------------- bad samples


def test_a_bad_sample_is_reported_and_replaced_by_a_good_sample(reference_run: list[Batch]) -> None:
    order, taken = Order(SOURCE.sizes, seed=3, window=30), []
    for step, batch in enumerate(reference_run):
        asked = [order(12 * step + place) for place in range(12)]
        taken += [i for i, wanted in zip(batch.index.tolist(), asked, strict=True) if wanted in BROKEN]
        assert len(batch.index) == 12
        assert not set(batch.index.tolist()) & BROKEN
        assert {b.key for b in batch.bad} >= {f"sample {i}" for i in asked if i in BROKEN}
        assert {b.reason for b in batch.bad} <= {"broken on purpose"}
        assert all(i == wanted for i, wanted in zip(batch.index.tolist(), asked, strict=True) if wanted not in BROKEN)
    assert sum(len(batch.bad) for batch in reference_run) >= 10  # five in each of two epochs
    assert len(set(taken)) > len(taken) // 2, "replacements vary"
    (batch,) = batches(Numbers([12], images={5: encode(picture(1100, 1000), "JPEG")}), 0, 12)
    (bad,) = batch.bad
    assert bad.key == "sample 5" and "1100x1000 pixels, more than data.max_pixels=1000000" in bad.reason


def test_only_bad_samples_raise_a_one_line_error() -> None:
    source = Numbers([20], broken=frozenset(range(20)))
    with pytest.raises(DataError, match=r"^100 samples in a row are bad, the last sample \d+: broken on purpose$"):
        batches(source, 0, 24, workers=2)


# -------------------------------------------------------------------------------------------------- evaluation


def eval_batches(source: Source, **options: Any) -> list[EvalBatch]:
    settings = {"batch": 7, "rank": 0, "world": 1, "workers": 0, "prefetch": 2, **options}
    view = replace(VIEW, augmentation=AugmentSpec(flip=1, grayscale=1))  # of training alone
    batch, rank, world = (settings.pop(key) for key in ("batch", "rank", "world"))
    return list(eval_loader(source, view, rank_batches(sum(source.sizes), batch, rank, world), **settings))


def test_evaluation_batches_are_the_same_for_any_number_of_ranks() -> None:
    for samples in (1, 7, 8, 101):
        source = Numbers([samples])
        alone, ranks = eval_batches(source), [eval_batches(source, rank=rank, world=3) for rank in range(3)]
        for batches_of in ([alone], ranks):
            found = sorted(i for rank in batches_of for batch in rank for i in batch.index)
            assert found == list(range(samples)), f"{samples=} world={len(batches_of)}"
        for step, expected in enumerate(alone):
            batch = ranks[step % 3][step // 3]
            assert batch.index == expected.index, f"{samples=} {step=}"
            assert torch.equal(batch.image.rows[0], expected.image.rows[0]), f"{samples=} {step=}"


def test_evaluation_gives_the_centre_view_all_captions_and_labels_and_reports_bad_samples() -> None:
    broken = {0, 1, 9}
    found = eval_batches(Numbers([2, 0, 30], broken=frozenset(broken)), batch=2, workers=2)
    assert (len(found[0].image), found[0].index, len(found[0].bad)) == (0, [], 2)
    assert [i for batch in found for i in batch.index] == [i for i in range(32) if i not in broken]
    assert [bad.key for batch in found for bad in batch.bad] == [f"sample {i}" for i in sorted(broken)]
    for batch in found:
        for image, index, captions, label in zip(
            batch.image.rows[0], batch.index, batch.captions, batch.labels, strict=True
        ):
            expected = eval_transform(decode(jpeg(index), 10**6), 12)
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
            assert list(captions) == [f"{index}", f"number {index}"]
            assert label == index


def test_a_loader_process_ends_at_the_sigterm_of_its_trainer_alone() -> None:
    """SLURM may send it to all processes of a job, which then have to load the batches before the save.

    It must not end them by a thread that a library starts in every forked process, as wandb's do.
    """
    others = set(multiprocessing.active_children())
    in_forks = [threading.Thread(target=time.sleep, args=(600,), daemon=True)]
    os.register_at_fork(after_in_child=lambda: any(map(threading.Thread.start, in_forks)))
    loader = stream(UNEVEN, 0, 48, workers=1)
    found = [next(loader)]
    in_forks.clear()
    (worker,) = set(multiprocessing.active_children()) - others
    for _ in range(2):
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        wait_until(lambda: not worker.is_alive() or not is_pending(signal.SIGTERM, worker.pid))  # a zombie's stays
        assert worker.is_alive(), "the process has ended"
    try:
        found += itertools.islice(loader, 3)  # the process is asked for the last now
    except DataError as error:
        pytest.fail(str(error))
    assert_same(found, batches(UNEVEN, 0, 48))
    os.kill(worker.pid or 0, signal.SIGTERM)
    worker.join()
    assert worker.exitcode == 0


def is_pending(number: signal.Signals, pid: int | None) -> bool:
    """Returns whether a process has been sent a signal that none of its threads has received."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) & 1 << number - 1)


# ----------------------------------------------------------------------------------------------------------------- pool


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
    options = {"workers": workers, "prefetch": 1, "part": part, "pool": pool}
    return train_batches(SOURCE, ORDER, VIEW, TOKENIZER, range(24, 144), 12, seed=3, **options)


def evaluation(pool: LoaderPool | None, workers: int = WORKERS) -> Iterator[EvalBatch]:
    return iter(eval_loader(SOURCE, VIEW, rank_batches(sum(SOURCE.sizes), 9, 0, 1), workers, READY, pool))


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
            assert all(
                torch.equal(a.image.rows[0], b.image.rows[0]) for a, b in zip(evaluated, expected[1], strict=True)
            )
    assert len(found) == len(expected[0])
    assert not any(batch.image.rows[0].is_inference() or batch.text.rows[0].is_inference() for batch in found)
    for one, other in zip(found, expected[0], strict=True):
        assert torch.equal(one.image.rows[0], other.image.rows[0])
        assert torch.equal(one.text.rows[0], other.text.rows[0])
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
