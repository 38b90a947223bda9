"""Options of the moving-average objectives, and the values that experiments give them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.objective_cases import ONE, assert_same, features, score
from helpers.runs import compose

from clipx.config.duration import Length
from clipx.objective.fcco import default_rho


def test_the_default_rho_grows_with_the_data_below_the_largest_reachable_kl_and_is_near_the_published_values() -> None:
    sizes = [3, 10, 1_000, 12_000, 10**6, 10**9, 10**12]
    found = [default_rho(n) for n in sizes]
    assert found == sorted(found) and all(0 < rho < math.log(n - 1) for rho, n in zip(found, sizes, strict=True))
    assert found[2:4] == pytest.approx([0.567, 1.519], abs=2e-3)
    published = {2_723_840: 6.5, 9_187_328: 8.5, 315_658_316: 16.0}
    assert [default_rho(samples) for samples in published] == pytest.approx(list(published.values()), rel=0.04)


@pytest.mark.parametrize("name", ["fastclip_v2", "fastclip_v3", "isogclr"])
def test_a_run_without_rho_equals_one_with_the_default_and_prints_it(name: str) -> None:
    length = Length(epoch=1_000, batch=10, total=20_000)
    unset = compose(f"objective={name}").objective
    assert unset.rho is None, "a saved configuration says that it was not chosen"
    typed = compose(f"objective={name}", f"objective.rho={default_rho(1_000)!r}").objective
    x, y = features(10)
    results = [score(one.build(ONE, length).double(), x, y, torch.arange(10)) for one in (unset, typed)]
    assert_same(results[0].tensors, results[1].tensors, atol=0)
    gamma = "γ from 1 to 0.6 (constant)" if name == "isogclr" else "γ from 1 to 0.474 (fitted)"
    assert unset.describe(length) == f"{gamma}, ρ = 0.567 for 1,000 samples"
    assert typed.describe(length) == f"{gamma}, ρ = {default_rho(1_000):g}"
