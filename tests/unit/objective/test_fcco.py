"""Options of the moving-average objectives."""

from __future__ import annotations

import math

import pytest

from clipx.objective.fcco import default_rho


def test_the_default_rho_grows_with_the_data_below_the_largest_reachable_kl_and_is_near_the_published_values() -> None:
    sizes = [3, 10, 1_000, 12_000, 10**6, 10**9, 10**12]
    found = [default_rho(n) for n in sizes]
    assert found == sorted(found) and all(0 < rho < math.log(n - 1) for rho, n in zip(found, sizes, strict=True))
    assert found[2:4] == pytest.approx([0.567, 1.519], abs=2e-3)
    published = {2_723_840: 6.5, 9_187_328: 8.5, 315_658_316: 16.0}
    assert [default_rho(samples) for samples in published] == pytest.approx(list(published.values()), rel=0.04)
