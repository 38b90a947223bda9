"""The table of per-sample state: row ownership, reads and writes, resharding through checkpoints."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.objective_cases import AVERAGES, assert_same, build, features, read, score

from clipx.distributed.comm import Comm
from clipx.errors import ClipxError
from clipx.objective.base import StepInputs
from clipx.objective.losses.sample_state import SampleTable, repeated_later

CPU, META = torch.device("cpu"), torch.device("meta")


def rank(k: int, world: int, device: torch.device = CPU) -> Comm:
    return Comm(k, world, k, device)


@pytest.mark.parametrize(("samples", "world"), [(10, 1), (10, 3), (10, 4), (3, 8), (16, 4), (400_000_000, 8)])
def test_every_row_has_exactly_one_owner(samples: int, world: int) -> None:
    tables = [SampleTable(rank(k, world), samples, 2, device=META) for k in range(world)]
    assert tables[0].start == 0
    assert tables[-1].stop == samples
    assert all(a.stop == b.start for a, b in itertools.pairwise(tables))
    assert sum(len(t.rows) for t in tables) == samples


def test_the_last_write_of_a_repeated_sample_wins() -> None:
    index = torch.tensor([4, 1, 4, 4, 1])
    table = SampleTable(rank(0, 1), 5, 1)
    table.write(index, torch.arange(5.0)[:, None])
    assert table.rows[[4, 1], 0].tolist() == [3.0, 4.0]
    assert repeated_later(index).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("name", AVERAGES)
def test_a_sample_index_out_of_range_raises_an_error_before_any_write(name: str) -> None:
    module, (x, y) = build(name, samples=30), features(6)
    score(module, x, y, torch.tensor([0, 29, 1, 2, 3, 4]))
    module.after_step(6)
    before = read(module, 30).clone()
    assert before[[0, 29]].isfinite().all()
    for number in (-1, 30, 1030):
        index = torch.tensor([0, 1, 2, number, 4, 5])
        module.before_step(6)
        with pytest.raises(ClipxError, match=rf"the sample index {number} is out of .*\b30\b"):
            module(StepInputs(x, y, index))
        module.after_step(12)
        assert_same({"": read(module, 30)}, {"": before}, atol=0)
