"""Comparisons of groups with the same other overrides: differences, and samples to reach the baseline's value."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from clipx.report.seed_statistics import Difference, Reached, difference, samples_to_reach
from clipx_launch.commands.report.groups import Group, Metric
from clipx_launch.commands.report.layout import Layout, Values


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups of a cell and the difference `a` - `b`. `cell`: values of the layout's `comparison_keys`."""

    cell: Values
    a: Group
    b: Group
    difference: Difference


@dataclass(frozen=True, slots=True)
class Reach:
    """Samples after which the mean of a group reaches the final mean of its baseline.

    `ratio`: by the samples of the baseline; None if not reached, with the reason in `note`.
    """

    group: Group
    baseline: Group
    target: float
    samples: float | None
    ratio: float | None
    note: str


def pairs(layout: Layout, metric: Metric) -> list[Pair]:
    """Returns all pairs of groups with finished runs in each cell."""
    found = []
    for cell, groups in layout.cells(layout.comparison_keys).items():
        counted = [group for group in groups if group.runs]
        found += [Pair(cell, a, b, _difference(a, b, metric)) for a, b in combinations(counted, 2)]
    return found


def to_baseline(layout: Layout, metric: Metric) -> list[Pair]:
    """Returns the difference of each group to the baseline of its cell. Omits groups without one."""
    found = []
    for cell, groups in layout.cells(layout.comparison_keys).items():
        for group in groups:
            base = layout.baseline_of(group)
            if group.runs and base is not None and base is not group:
                found.append(Pair(cell, group, base, _difference(group, base, metric)))
    return found


def _difference(a: Group, b: Group, metric: Metric) -> Difference:
    return difference(a.numbers(metric), b.numbers(metric))


def reaches(layout: Layout, metric: Metric) -> list[Reach]:
    """Returns the samples to reach the baseline's final mean for each group with a baseline, the baseline included."""
    found = []
    for groups in layout.cells(layout.comparison_keys).values():
        for group in groups:
            base = layout.baseline_of(group)
            if group.runs and base is not None:
                found.append(_reach(group, base, metric))
    return found


def _reach(group: Group, base: Group, metric: Metric) -> Reach:
    final, curve, of_base = base.spread(metric), group.curve(metric), base.curve(metric)
    assert final is not None
    if not curve or not of_base:
        return Reach(group, base, final.mean, None, None, "the seeds were not evaluated after the same samples")
    reached = samples_to_reach(curve, final.mean, metric.lowest)
    if reached is None:
        return Reach(group, base, final.mean, None, None, "not reached")
    return Reach(
        group, base, final.mean, reached.samples, reached.samples / of_base[-1].samples, _note(reached, len(curve))
    )


def _note(reached: Reached, evaluations: int) -> str:
    if evaluations == 1:
        return "at most: one evaluation, at the end"
    return "at most: reached at the first evaluation" if reached.first else ""
