"""Statistics over seeds, compared with numpy and with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clipx.report.seed_statistics import CurvePoint, difference, mean_curve, samples_to_reach

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


def test_a_mean_curve_has_the_places_of_all_runs_and_no_infinite_values() -> None:
    curves = [[(1.0, 1.0), (2.0, 2.0), (3.0, math.nan), (4.0, 4.0)], [(1.0, 3.0), (2.0, 2.0), (3.0, 3.0), (5.0, 4.0)]]
    assert mean_curve(curves) == [CurvePoint(1.0, 2.0, pytest.approx(math.sqrt(2))), CurvePoint(2.0, 2.0, 0.0)]
    assert mean_curve([]) == []
    assert mean_curve([[(1.0, 1.0)], [(2.0, 1.0)]]) == []
    assert mean_curve([[(1.0, 5.0)]]) == [CurvePoint(1.0, 5.0, None)]


def test_samples_to_reach_are_interpolated_between_evaluations() -> None:
    curve = [CurvePoint(100 * n, value, None) for n, value in enumerate((0.1, 0.5, 0.4, 0.9), start=1)]
    assert samples_to_reach(curve, 0.3) == pytest.approx(150)
    assert samples_to_reach(curve, 0.5) == pytest.approx(200)
    assert samples_to_reach(curve, 0.65) == pytest.approx(350)
    assert samples_to_reach(curve, 0.95) is None
    assert samples_to_reach(curve, 0.05) == 100, "at most: at the first point"
    assert samples_to_reach([], 0.05) is None


def test_a_low_target_is_reached_from_above() -> None:
    curve = [CurvePoint(10, 3.0, None), CurvePoint(20, 2.0, None), CurvePoint(30, 1.0, None)]
    assert samples_to_reach(curve, 1.25, lowest=True) == pytest.approx(27.5)
    assert samples_to_reach(curve, 0.5, lowest=True) is None
