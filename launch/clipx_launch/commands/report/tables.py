"""Tables of the report: groups, time, differences, samples to reach, points left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clipx.report.console import is_share
from clipx.report.page import Cell, matrix, table
from clipx.report.seed_statistics import Difference, Spread
from clipx_launch.commands.report.comparisons import Pair, Reach
from clipx_launch.commands.report.figures import short_number
from clipx_launch.commands.report.groups import Group, LeftOut, Metric, numbers_of, overrides_text
from clipx_launch.commands.report.layout import Layout, Values, contender_name, label

ONE_SEED = "one seed: no deviation"
_NONE = "–"
_MARKED = 2.0  # differences of more than 2 pooled deviations are bold


def number(metric: Metric, value: float, sign: bool = False) -> str:
    """Formats a value of a metric: shares in percent without the sign %."""
    plus = "+" if sign else ""
    return f"{100 * value:{plus}.2f}" if is_share(metric.names[0]) else f"{value:{plus},.4g}"


def heading(metric: Metric, of: str = "") -> str:
    return (of or metric.label.removeprefix("eval/")) + (", %" if is_share(metric.names[0]) else "")


def points(metric: Metric, of: str) -> str:
    """Returns the heading of a difference: shares differ by percentage points."""
    return of + (", percentage points" if is_share(metric.names[0]) else "")


def spread_cell(metric: Metric, found: Spread | None, best: bool = False, sign: bool = False) -> Cell:
    """Returns mean ± deviation, sorted by the mean."""
    if found is None:
        return Cell(_NONE)
    return Cell(spread_text(metric, found, sign), found.mean, best)


def spread_text(metric: Metric, found: Spread, sign: bool = False) -> str:
    """Formats mean ± deviation, both to the second digit of the deviation; shares to hundredths of a percent."""
    if not found.deviation or is_share(metric.names[0]):
        deviation = "" if found.deviation is None else f" ± {number(metric, found.deviation)}"
        return number(metric, found.mean, sign) + deviation
    digits = max(0, 1 - math.floor(math.log10(found.deviation)))
    return f"{found.mean:{'+' if sign else ''},.{digits}f} ± {found.deviation:,.{digits}f}"


def best_groups(layout: Layout, metric: Metric) -> set[Group]:
    """Returns the group with the best mean in each cell with several groups."""
    found = set()
    for groups in layout.cells(layout.comparison_keys).values():
        means = {group: of.mean for group in groups if (of := group.spread(metric))}
        if len(means) > 1:
            found.add((min if metric.lowest else max)(means, key=means.__getitem__))
    return found


def cell_table(layout: Layout, metric: Metric) -> str:
    """Returns the metric with a row for each value of the compared overrides and a column for each cell."""
    cells, best = layout.cells(layout.comparison_keys), best_groups(layout, metric)
    names = dict.fromkeys(_name(layout, group) for groups in cells.values() for group in groups)
    found = {(cell, _name(layout, group)): group for cell, groups in cells.items() for group in groups}
    rows: list[list[Cell | str]] = []
    for name in names:
        row = [found.get((cell, name)) for cell in cells]
        shown = [Cell(_NONE) if g is None else spread_cell(metric, g.spread(metric), g in best) for g in row]
        rows.append([name, *shown])
    columns = [label(layout.comparison_keys, cell) for cell in cells]
    return table([" and ".join(layout.compared_keys), *columns], rows, numbers=len(columns))


def group_table(layout: Layout, metrics: Sequence[Metric]) -> str:
    """Returns a row for each group: varied overrides, seeds, metrics. The best mean of each cell is bold."""
    rows, best = [], best_groups(layout, metrics[0])
    for group in layout.groups:
        first, *others = (group.spread(metric) for metric in metrics)
        more = [spread_cell(metric, found) for metric, found in zip(metrics[1:], others, strict=True)]
        rows.append([*_values(layout.keys, group), spread_cell(metrics[0], first, group in best), _seeds(group), *more])
    columns = [*layout.keys, heading(metrics[0]), "seeds", *map(heading, metrics[1:])]
    return table(columns, rows, numbers=1 + len(metrics))


def _values(keys: Sequence[str], group: Group) -> list[Cell]:
    return [_value(group.value(key)) for key in keys]


def _value(text: str) -> Cell:
    return Cell(text, (numbers_of([text]) or {}).get(text))


def _seeds(group: Group) -> Cell:
    counted = len(group.runs)
    return Cell(f"{counted}" if counted == group.points else f"{counted} of {group.points}", counted)


def time_table(layout: Layout) -> str:
    """Returns the time of a step and the throughput of each group: mean ± deviation over the runs' medians."""
    plain = Metric(("value",), False)
    rows = [
        [*_values(layout.keys, group), _seeds(group), spread_cell(plain, group.step_ms),
         spread_cell(plain, group.samples_per_second)]
        for group in layout.groups
    ]  # fmt: skip
    return table([*layout.keys, "seeds", "step, ms", "samples/s"], rows, numbers=3)


def difference_table(layout: Layout, metric: Metric, pairs: Sequence[Pair]) -> str:
    """Returns a row for each pair: cell, both groups, difference, pooled deviation, paired difference."""
    rows: list[list[Cell | str]] = []
    for pair in pairs:
        found = pair.difference
        rows.append([
            _name(layout, pair.a), _name(layout, pair.b), *map(_value, pair.cell), _n(found),
            Cell(number(metric, found.mean, sign=True), found.mean),
            Cell(ONE_SEED) if found.pooled is None else Cell(number(metric, found.pooled), found.pooled),
            Cell(units(found), found.units, found.units is not None and abs(found.units) > _MARKED),
            Cell(_NONE) if found.paired is None else spread_cell(metric, found.paired, sign=True),
            Cell(str(found.paired.n if found.paired else 0), found.paired.n if found.paired else 0),
        ])  # fmt: skip
    numeric = [
        "seeds", points(metric, "difference"), heading(metric, "pooled deviation"), "in pooled deviations",
        points(metric, "paired difference"), "pairs",
    ]  # fmt: skip
    return table(["group", "minus", *layout.comparison_keys, *numeric], rows, numbers=len(numeric))


def units(found: Difference) -> str:
    """Formats a difference in units of the pooled deviation, or the reason why there is none."""
    if found.units is not None:
        return f"{found.units:+.2f}"
    return ONE_SEED if found.pooled is None else "equal values of all seeds"


def _name(layout: Layout, group: Group) -> str:
    return contender_name(group.values(layout.compared_keys))


def _n(found: Difference) -> Cell:
    a, b = found.n
    return Cell(f"{a}" if a == b else f"{a}, {b}", min(a, b))


def difference_matrices(layout: Layout, pairs: Sequence[Pair]) -> str:
    """Returns a matrix for each cell: row minus column in units of the pooled deviation."""
    cells: dict[Values, list[Pair]] = {}
    for pair in pairs:
        cells.setdefault(pair.cell, []).append(pair)
    shown = "\n".join(_matrix(layout, cell, found) for cell, found in cells.items())
    return f'<div class="matrices">{shown}</div>'


def _matrix(layout: Layout, cell: Values, pairs: Sequence[Pair]) -> str:
    groups = list(dict.fromkeys(group for pair in pairs for group in (pair.a, pair.b)))
    found = {(pair.a, pair.b): pair.difference.units for pair in pairs}
    entries, marked = [], []
    for row in groups:
        values = [_signed(found, row, column) for column in groups]
        entries.append([
            "" if row is column else "?" if value is None else f"{value:+.{1 if abs(value) < 9.95 else 0}f}"
            for column, value in zip(groups, values, strict=True)
        ])  # fmt: skip
        marked.append([value is not None and abs(value) > _MARKED for value in values])
    return matrix(label(layout.comparison_keys, cell), [_name(layout, g) for g in groups], entries, marked)


def _signed(found: dict[tuple[Group, Group], float | None], row: Group, column: Group) -> float | None:
    if (row, column) in found:
        return found[row, column]
    other = found.get((column, row))
    return None if other is None else -other


def reach_table(layout: Layout, metric: Metric, reaches: Sequence[Reach]) -> str:
    """Returns the samples after which each group reaches the final mean of its baseline."""
    rows: list[list[Cell | str]] = []
    for reach in reaches:
        ratio, samples = reach.ratio, reach.samples
        rows.append([
            _name(layout, reach.group), *_values(layout.comparison_keys, reach.group),
            Cell(number(metric, reach.target), reach.target),
            Cell(_NONE) if samples is None else Cell(short_number(samples), samples),
            Cell(_NONE) if ratio is None else Cell(f"{ratio:.3f}", ratio),
            Cell(_NONE) if ratio is None else Cell(f"{1 / ratio:.2f}×", 1 / ratio),
            reach.note,
        ])  # fmt: skip
    numeric = [
        heading(metric, "baseline's final mean"),
        "samples",
        "share of the baseline's",
        "baseline / group",
        "note",
    ]
    return table(["group", *layout.comparison_keys, *numeric], rows, numbers=len(numeric))


def left_out_table(left_out: Sequence[LeftOut]) -> str:
    """Returns the points that no group counts, with the reason."""
    return table(
        ["point", "overrides", "reason"],
        [[item.run.name, overrides_text(item.run.varied), item.reason] for item in left_out],
    )
