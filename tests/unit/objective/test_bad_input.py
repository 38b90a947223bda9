"""Errors of objectives: one line with value, rule and fix, raised as early as the values are known."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.objective_cases import AVERAGES, EACH, SETTINGS, assert_same, build, features, read, score

from clipx.errors import ClipxError, ConfigError
from clipx.objective.base import StepInputs
from clipx.objective.fcco import default_rho

N, B = 30, 6
every_average = pytest.mark.parametrize("name", AVERAGES)


@every_average
def test_a_sample_index_out_of_range_raises_an_error_before_any_write(name: str) -> None:
    module, (x, y) = build(name, samples=N), features(B)
    score(module, x, y, torch.tensor([0, N - 1, 1, 2, 3, 4]))
    module.after_step(B)
    before = read(module, N).clone()
    assert before[[0, N - 1]].isfinite().all()
    for number in (-1, N, N + 1000):
        index = torch.tensor([0, 1, 2, number, 4, 5])
        module.before_step(B)
        with pytest.raises(ClipxError, match=rf"the sample index {number} is out of .*\b{N}\b"):
            module(StepInputs(x, y, index))
        module.after_step(2 * B)
        assert_same({"": read(module, N)}, {"": before}, atol=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_of_a_single_sample_raises_an_error(name: str) -> None:
    module = build(name, batch=1)
    with pytest.raises(ConfigError, match="a global batch of 1 has no negatives: give data.batch_size of at least 2"):
        module(StepInputs(*features(1), torch.tensor([0])))


ROBUST = ("fastclip_v3", "neuclip")


@pytest.mark.parametrize("name", [*EACH, *ROBUST])
def test_rho_must_be_below_the_largest_reachable_kl(name: str) -> None:
    """KL(softmax of a row's negatives ‖ uniform) is below log(n-1), and the stationary point is where it equals ρ."""
    limit = math.log(N - 1)
    build(name, f"objective.rho={limit - 1e-3}")
    for rho in (limit, limit + 1e-3, 50.0):
        with pytest.raises(
            ConfigError, match=rf"objective.rho={rho} must be below log\(samples - 1\) = {limit:.4g} .*\b{N} samples"
        ):
            build(name, f"objective.rho={rho}")


def test_the_default_rho_is_below_the_largest_reachable_kl_and_near_the_published_values() -> None:
    assert all(0 < default_rho(n) < math.log(n - 1) for n in (3, 10, 1_000, 12_000, 10**6, 10**9, 10**12))
    published = {2_723_840: 6.5, 9_187_328: 8.5, 315_658_316: 16.0}
    assert [default_rho(samples) for samples in published] == pytest.approx(list(published.values()), rel=0.04)
