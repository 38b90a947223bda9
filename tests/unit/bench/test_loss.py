"""Contestants of the loss benchmark on CUDA: chosen and built here, measured on a device."""

from __future__ import annotations

import pytest
from helpers.objective_cases import ONE

from clipx.bench.loss import Contest, LossCase, _row
from clipx.bench.race import Lap, race


def test_ratios_on_cuda_are_against_open_clip_in_bfloat16() -> None:
    """The losses in float32 are the reference of the results."""
    contest = Contest.of(["infonce", "fastclip_v3", "siglip"], "cuda")
    assert contest.names[3:] == ["open_clip_bf16", "open_clip_siglip_bf16", "open_clip", "open_clip_siglip"]
    assert contest.reference["fastclip_v3"] == contest.reference["infonce"] == "open_clip_bf16"
    assert contest.same == {"infonce": "open_clip", "siglip": "open_clip_siglip"}


def test_ratios_on_the_cpu_are_against_open_clip_in_float32() -> None:
    contest = Contest.of(["infonce", "siglip"], "cpu")
    assert contest.names[2:] == ["open_clip", "open_clip_plain", "open_clip_siglip"]
    assert contest.reference == contest.same == {"infonce": "open_clip", "siglip": "open_clip_siglip"}


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
