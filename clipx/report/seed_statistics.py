"""Statistics of runs that differ in their seeds: spread, differences, mean curves, samples to reach a value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[float, float]]
"""(samples seen, value) in ascending order of the samples."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean of `n` values and their sample standard deviation, None for one value."""

    n: int
    mean: float
    deviation: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of the means of two groups of runs.

    `pooled_deviation`: None unless both groups have at least two seeds. `units`: the difference in pooled deviations
    (Cohen's d), None without a positive one. `seeds`: numbers of both groups. `paired`: of the differences between runs
    of the same seed, None without any.
    """

    difference: float
    pooled_deviation: float | None
    units: float | None
    seeds: tuple[int, int]
    paired: Spread | None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Mean and deviation over seeds after a number of samples."""

    samples: float
    mean: float
    deviation: float | None


def spread(values: Sequence[float]) -> Spread:
    """Returns the mean and the sample standard deviation (n - 1) of at least one value."""
    return Spread(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def difference(a: Mapping[str, float], b: Mapping[str, float]) -> Difference:
    """Returns the difference a - b of two groups, each with a value for each of its seeds."""
    first, second = spread(list(a.values())), spread(list(b.values()))
    pooled = None
    if first.deviation is not None and second.deviation is not None:
        squares = (first.n - 1) * first.deviation**2 + (second.n - 1) * second.deviation**2
        pooled = math.sqrt(squares / (first.n + second.n - 2))
    mean, both = first.mean - second.mean, [a[seed] - b[seed] for seed in a if seed in b]
    units = mean / pooled if pooled else None
    return Difference(mean, pooled, units, (first.n, second.n), spread(both) if both else None)


def mean_curve(curves: Sequence[Curve], most: int = 120) -> list[CurvePoint]:
    """Returns the mean and the deviation over runs at the numbers of samples at which all runs have a finite value.

    If these are more than `most`, neighbouring ones are first averaged within each run, in `most` intervals.
    """
    finite = [{at: value for at, value in curve if math.isfinite(value)} for curve in curves]
    common = sorted(set.intersection(*map(set, finite))) if finite else []
    number = min(len(common), most)
    found = []
    for k in range(number):
        interval = common[len(common) * k // number : len(common) * (k + 1) // number]
        whole = spread([statistics.fmean(curve[at] for at in interval) for curve in finite])
        found.append(CurvePoint(statistics.fmean(interval), whole.mean, whole.deviation))
    return found


def samples_to_reach(curve: Sequence[CurvePoint], target: float, lowest: bool = False) -> float | None:
    """Returns the number of samples at which the mean first reaches `target`, None if it never does.

    It is interpolated linearly between the two points of the crossing; at the first point it is an upper bound.
    `lowest`: a low value is a good one.
    """
    sign = -1 if lowest else 1
    at = next((i for i, point in enumerate(curve) if sign * point.mean >= sign * target), None)
    if not at:
        return None if at is None else curve[0].samples
    a, b = curve[at - 1], curve[at]
    return a.samples + (target - a.mean) / (b.mean - a.mean) * (b.samples - a.samples)
