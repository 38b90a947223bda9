"""Statistics over seeds, compared with numpy and with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clipx.report.seed_statistics import CurvePoint, difference, samples_to_reach

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (5, 5), (5, 3), (2, 7)])
def test_the_difference_is_that_of_means_over_the_pooled_deviation(n: int, m: int) -> None:
    a = {str(seed): float(value) for seed, value in enumerate(RANDOM.normal(0.6, 0.02, n))}
    b = {str(seed): float(value) for seed, value in enumerate(RANDOM.normal(0.5, 0.05, m))}
    found = difference(a, b)
    mean_a, mean_b = sum(a.values()) / n, sum(b.values()) / m
    squares = sum((x - mean_a) ** 2 for x in a.values()) + sum((x - mean_b) ** 2 for x in b.values())
    assert found.seeds == (n, m)
    assert found.difference == pytest.approx(mean_a - mean_b)
    assert found.pooled_deviation == pytest.approx(math.sqrt(squares / (n + m - 2)))
    assert found.units == pytest.approx((mean_a - mean_b) / math.sqrt(squares / (n + m - 2)))
    both = np.array([a[seed] - b[seed] for seed in map(str, range(min(n, m)))])
    assert found.paired is not None
    assert (found.paired.n, found.paired.mean) == (min(n, m), pytest.approx(both.mean()))
    assert found.paired.deviation == pytest.approx(both.std(ddof=1))


def test_a_low_target_is_reached_from_above() -> None:
    curve = [CurvePoint(10, 3.0, None), CurvePoint(20, 2.0, None), CurvePoint(30, 1.0, None)]
    assert samples_to_reach(curve, 1.25, lowest=True) == pytest.approx(27.5)
    assert samples_to_reach(curve, 0.5, lowest=True) is None
