"""Contestants of the loss benchmark, and its rows."""

from __future__ import annotations

import pytest
from helpers.objective_cases import ONE

from clipx.bench.loss import Contest, LossCase, _row
from clipx.bench.race import Lap, race


@pytest.mark.parametrize("name", ["open_clip", "open_clip_siglip"])
def test_autocast_rounds_the_logits_of_open_clip_to_bfloat16(name: str) -> None:
    laps = race(ONE, (64, 32), [name, f"{name}_bf16"], Contest([name, f"{name}_bf16"], {}, {}).references(), 1, 0)
    error = laps[f"{name}_bf16"].gradient_error
    assert error is not None
    assert 1e-3 < error < 0.1


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    laps = [
        Lap(times, loss, error, {}, 8, False) for times, loss, error in (([1.0, 4.0], 1.0, 0.1), ([2.0, 3.0], 2.0, 0.3))
    ]
    row = _row(LossCase(8, 2, 4), "infonce", "cpu", laps)
    assert (row.times, row.seconds, row.loss, row.gradient_error) == ([2.0, 4.0], 3.0, 1.5, 0.3)
