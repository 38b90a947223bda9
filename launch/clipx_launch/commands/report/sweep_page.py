"""Page of a sweep: the sections of the report, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

from clipx.report.chart import Chart, Charts, Series
from clipx.report.console import is_share
from clipx.report.page import details, figures, legend, listing, page, paragraph, section
from clipx_launch.commands.report import facts, tables
from clipx_launch.commands.report.comparisons import pairs, reaches, to_baseline
from clipx_launch.commands.report.figures import SWATCH, Curve, Dot, Panels, limits_of, swatch
from clipx_launch.commands.report.groups import Group, LeftOut, Metric
from clipx_launch.commands.report.layout import Layout, Values, contender_name, label
from clipx_launch.commands.report.points import Points
from clipx_launch.commands.run import Run

Item = TypeVar("Item", Curve, Dot)

MOST_PANELS = 24  # of a section
_MOST_COLUMNS = 12  # cells of the short table
_LOGGED = (
    ("Training loss", "train/loss", "Losses of different objectives have different scales."),
    ("γ", "train/gamma", "Weight of the current batch in the moving averages."),
    ("Temperature τ", "train/temperature", "The mean if each sample has a separate temperature."),
    ("log u", "train/log_u", "½ mean log(ε + u) over both directions of the moving averages u."),
)


@dataclass(frozen=True, slots=True)
class Content:
    """All that the report shows. `metrics`: those of the table, the report's first."""

    title: str
    folders: Sequence[Path]
    runs: Sequence[Run]
    layout: Layout
    metrics: Sequence[Metric]
    left_out: Sequence[LeftOut]

    @property
    def metric(self) -> Metric:
        return self.metrics[0]


def render(content: Content) -> str:
    """Returns the page as HTML."""
    drawn = _Drawn(content)
    points = Points(content.title, content.runs, content.layout, content.metrics)
    parts = [_summary(content), _groups(content), points.sections(), drawn.against(), drawn.held_out()]
    parts += [_differences(content), _reaches(content), *drawn.logged(), _time(content), _left_out(content)]
    parts += [_commands(content), drawn.charts.script()]
    scripts, styles = ("chart_tools.js", "chart.js", "parallel.js"), ("chart.css", "parallel.css")
    return page(content.title, "".join(parts), scripts, styles)


def _summary(content: Content) -> str:
    layout, left = content.layout, len(content.left_out)
    counted = len(content.runs) - left
    dates = facts.dates(content.runs)
    lines = [
        f"{counted} of {len(content.runs)} points in {len(layout.groups)} groups"
        + (f"; {left} left out, listed below" if left else "")
        + (f". Trained {' to '.join(dict.fromkeys(dates))} (UTC)." if dates else "."),
        f"Metric: {content.metric.label}, the last value of each point"
        + (f", as the mean of {' and '.join(content.metric.names)}" if len(content.metric.names) > 1 else "")
        + f"; the {'lowest' if content.metric.lowest else 'highest'} is the best.",
        "± is the sample standard deviation over the seeds.",
    ]
    if layout.by:
        lines.append(f"Contenders (colours): {' and '.join(layout.by)}.")
    if layout.tied:
        each = " and ".join((*layout.by, *([layout.x] if layout.x else [])))
        lines.append(f"{', '.join(layout.tied)}: one value for each {each}, regarded as part of it in comparisons.")
    return "".join(map(paragraph, lines))


def _groups(content: Content) -> str:
    layout = content.layout
    words = "Mean ± deviation over the seeds. A click on a header sorts."
    if layout.compared_keys:
        words += f" Bold: the best mean among the groups that differ only in {' and '.join(layout.compared_keys)}."
    parts = [paragraph(words), tables.group_table(layout, content.metrics)]
    if 1 < len(layout.cells(layout.comparison_keys)) <= _MOST_COLUMNS and layout.compared_keys:
        named = paragraph(f"{tables.heading(content.metric)}:")
        parts[1:1] = [named, tables.cell_table(layout, content.metric), paragraph("All groups and metrics:")]
    return section("Results", *parts)


class _Drawn:
    """Sections with figures."""

    def __init__(self, content: Content) -> None:
        self._layout, self._metric, self._panels = content.layout, content.metric, Panels()
        self._names = list(map(contender_name, self._layout.contenders))
        self._swatches = list(map(swatch, range(len(self._names))))
        self._legends = count(1)
        self.charts = Charts("means")

    def against(self) -> str:
        """Returns the metric against x; without x, by contender."""
        layout, x = self._layout, self._layout.x
        cells = {cell: [dot for group in groups if (dot := self._dot(group))] for cell, groups in self._cells()}
        cells = {cell: dots for cell, dots in cells.items() if dots}
        limits = limits_of(dot.spread for dots in cells.values() for dot in dots)

        def draw(dots: list[Dot]) -> str:
            if x is None:
                return self._panels.by_contender(dots, self._names, self._metric.label)
            return self._panels.against(dots, x, self._metric.label, limits)

        shown = f"by {' and '.join(layout.by) or 'group'}" if x is None else f"against {x}"
        bars = "Error bars: one deviation over the seeds" + ("; small dots: the seeds." if x is None else ".")
        return section(
            f"Metric {shown}", paragraph(bars), "" if x is None else self._legend(),
            *self._grid(layout.cell_keys, cells, draw),
        )  # fmt: skip

    def held_out(self) -> str:
        """Returns the curves of the metric. All panels have the same limits."""
        title, curves = "Metric against samples seen", self._curves(self._metric)
        if not curves:
            return section(title, paragraph("No group has seeds that were evaluated after the same samples."))
        limits = limits_of(point for cell in curves.values() for curve in cell for point in curve.points)
        once = all(len(curve.points) == 1 for cell in curves.values() for curve in cell)
        note = " Points were evaluated once: evaluator.NAME.every=… evaluates during the run." if once else ""
        return section(
            title,
            paragraph(f"Mean over the seeds and a band of one deviation.{note}"),
            *self._curve_panels(curves, self._metric.label, limits),
        )

    def logged(self) -> Iterator[str]:
        """Yields a section for each training metric that a run has logged."""
        for title, name, words in _LOGGED:
            curves = self._curves(Metric((name,), lowest=False))
            if curves and self._metric.names != (name,):
                shown = self._curve_panels(curves, name)
                yield section(title, paragraph(f"Mean and one deviation of {name}. {words}"), *shown)

    def _curve_panels(
        self, cells: dict[Values, list[Curve]], metric: str, limits: tuple[float, float] | None = None
    ) -> Iterator[str]:
        """Yields the panels of curves: interactive charts, and drawn panels for readers without scripts."""
        yield f'<div class="static">{self._legend()}'
        yield from self._grid(self._layout.curve_keys, cells, lambda c: self._panels.curves(c, metric, limits))
        yield "</div>"
        found = [
            Chart(label(self._layout.curve_keys, cell) or metric, list(map(self._mean, curves)), share=is_share(metric),
                  legend=len(curves) > 1, limits=limits)
            for cell, curves in list(cells.items())[:MOST_PANELS]
        ]  # fmt: skip
        few = " few" if len(found) <= 2 else ""
        yield f'<div class="charts live{few}">{"".join(map(self.charts.figure, found))}</div>'

    def _mean(self, curve: Curve) -> Series:
        """Returns a mean curve with its band for a chart."""
        x, y = [point.samples for point in curve.points], [point.mean for point in curve.points]
        half = [point.deviation or 0.0 for point in curve.points]
        return Series(self._names[curve.contender], x, y, half=half, style=curve.contender)

    def _legend(self) -> str:
        """Returns the legend, with ids that no other legend of the page has. Empty without contenders."""
        number = next(self._legends)
        swatches = [drawn.replace(SWATCH, f"{SWATCH}{number}-") for drawn in self._swatches]
        return legend(self._names, swatches) if self._layout.by else ""

    def _cells(self) -> list[tuple[Values, list[Group]]]:
        return list(self._layout.cells(self._layout.cell_keys).items())

    def _dot(self, group: Group) -> Dot | None:
        found = group.spread(self._metric)
        if found is None:
            return None
        x = self._layout.x_values.get(group.value(self._layout.x), 0.0) if self._layout.x else 0.0
        return Dot(self._layout.contender(group), x, found, list(group.numbers(self._metric).values()))

    def _curves(self, metric: Metric) -> dict[Values, list[Curve]]:
        found: dict[Values, list[Curve]] = {}
        for cell, groups in self._layout.cells(self._layout.curve_keys).items():
            for group in groups:
                if points := group.curve(metric):
                    found.setdefault(cell, []).append(Curve(self._layout.contender(group), points))
        return found

    def _grid(self, keys: Values, cells: dict[Values, list[Item]], draw: Callable[[list[Item]], str]) -> Iterator[str]:
        """Yields the panels of the cells, at most MOST_PANELS, and a line that counts the others."""
        first = list(cells.items())[:MOST_PANELS]
        yield figures((label(keys, cell), draw(items)) for cell, items in first)
        if len(cells) > len(first):
            yield paragraph(f"{len(first)} of {len(cells)} panels are drawn; report.json has the values of all groups.")


def _differences(content: Content) -> str:
    layout, metric = content.layout, content.metric
    if not layout.baseline:
        return ""
    all_pairs, based = pairs(layout, metric), to_baseline(layout, metric)
    named = label(layout.baseline, layout.baseline.values())
    words = (
        f"Groups are compared where all other overrides are equal. Baseline: {named} (--baseline chooses another). A "
        "difference in pooled deviations is the difference of the means divided by the pooled sample deviation of both "
        "groups; the paired difference is the mean ± deviation of the differences between runs of the same seed. Bold: "
        "more than 2 pooled deviations."
    )
    parts = [paragraph(words), tables.difference_table(layout, metric, based)]
    if not based:
        parts[1] = paragraph("No cell has the baseline and another group with finished points.")
    if len(all_pairs) > len(based):
        parts.append(paragraph("All pairs, row minus column in pooled deviations; ?: no deviation."))
        parts.append(tables.difference_matrices(layout, all_pairs))
        parts.append(details(f"all {len(all_pairs)} pairs", tables.difference_table(layout, metric, all_pairs)))
    return section("Differences", *parts)


def _reaches(content: Content) -> str:
    found = reaches(content.layout, content.metric)
    if not found:
        return ""
    words = (
        "Samples after which the mean over the seeds first reaches the final mean of the baseline in the same cell, "
        "interpolated linearly between evaluations; the share is relative to all samples of the baseline."
    )
    return section("Samples to reach", paragraph(words), tables.reach_table(content.layout, content.metric, found))


def _time(content: Content) -> str:
    words = (
        "Median over the logged intervals of each point, without evaluations and checkpoints; mean ± deviation over "
        "the seeds. Points that ran at the same time on one machine slow each other down."
    )
    return section("Time per step", paragraph(words), tables.time_table(content.layout))


def _left_out(content: Content) -> str:
    if not content.left_out:
        return section("Points left out", paragraph("None: all points have finished with a value of the metric."))
    return section("Points left out", tables.left_out_table(content.left_out))


def _commands(content: Content) -> str:
    commands = facts.commands(content.folders) or ["not recorded: the sweep was launched by an earlier version"]
    recorded = facts.versions(content.runs)
    versions = [f"{name} {', '.join(found) or 'not recorded'}" for name, found in recorded.items()]
    each = [f"# {run.name}\n{facts.point_command(run)}" for run in content.runs]
    return section(
        "Commands and versions",
        listing(commands),
        paragraph(f"Versions of the runs: {'; '.join(versions)}."),
        details(f"commands of all {len(each)} points", listing(line for text in each for line in text.split("\n"))),
    )
