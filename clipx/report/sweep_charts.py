"""Charts of the report of a sweep: parallel coordinates, curves of all runs, means of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from clipx.report.chart import Chart, Charts, Series
from clipx.report.page import data_script, details, paragraph, section, with_minus
from clipx.report.parallel import log_spaced, number_axis, override_axis
from clipx.report.sweep_groups import RUN, Group, Metric, SweepLayout, SweepRun, Values

_MOST_PANELS, _FIRST_PANELS = 24, 6  # of a section: all, and those that are shown at first
_MOST_POINTS = 60_000  # of all series of a chart
_MOST_NAMES = 12  # runs in a legend, if each is a contender
_LOGGED = (
    ("Training loss", "train/loss", "Losses of different objectives have different scales."),
    ("γ", "train/gamma", "Weight of the current batch in the moving averages."),
    ("Temperature τ", "train/temperature", "The mean if each sample has a separate temperature."),
    ("log u", "train/log_u", "½ mean log(ε + u) over both directions of the moving averages u."),
)

Draw = Callable[[Sequence[Group]], Iterator[Series]]
"""Returns the series of a panel from its groups."""


def run_charts(runs: Sequence[SweepRun], layout: SweepLayout, metric: Metric, keys: Sequence[str]) -> tuple[str, str]:
    """Returns parallel coordinates with an axis for each key and one for the metric, and the curves of all runs.

    A run has the colour of its contender; if there is only one, that of its value. The best run is on top.
    """
    values = [metric.value(run) for run in runs]
    known = sorted((value for value in values if value is not None), reverse=metric.lowest)
    width = known[-1] - known[0]
    ranks = [None if v is None else round((v - known[0]) / width, 4) if width else 1.0 for v in values]
    contenders = {run: layout.contender(group) for group in layout.groups for run in group.all}
    styles = [contenders[run] for run in runs] if len(layout.names) > 1 else None
    axes = [override_axis(key, [run.value(key) for run in runs]) for key in keys]
    scale = 100 if metric.share else 1
    scaled = [None if v is None else scale * v for v in values]
    axes.append(number_axis(metric.heading, scaled, lambda value: with_minus(metric.text(value / scale))))
    data = {"axes": axes, "ranks": ranks, "styles": styles, "charts": "runs"}

    charts = Charts("runs", most=max(20, min(400, _MOST_POINTS // len(runs))), each=True)
    order, figures = sorted(range(len(runs)), key=lambda i: ranks[i] or -1), []
    for shown in dict.fromkeys((metric, Metric(("train/loss",), lowest=True))):
        series = []
        for i in order:
            if points := sorted(shown.curve(runs[i]), key=lambda point: point[0]):
                style, rank = (styles[i], None) if styles else (6, ranks[i])
                x, y = zip(*points, strict=True)
                series.append(Series(runs[i].label, x, y, style=style, run=f"r{i}", rank=rank))
        smooth, legend = shown.names[0].startswith("train/"), len(runs) == len(layout.names) <= _MOST_NAMES
        if series:
            figures.append(charts.figure(Chart(shown.label, series, shown.share, smooth=smooth, legend=legend)))
    words = f"A curve for each run, in the colour of its {'contender' if styles else 'value'}, the best one on top."
    parts = [paragraph(words), charts.controls(), f'<div class="charts few">{"".join(figures)}</div>', charts.script()]
    parallel = '<figure class="parallel"></figure>' + data_script("parallel", data) if keys else ""
    return parallel, section("Curves of all runs", *parts) if figures else ""


def metric_by_x(layout: SweepLayout, metric: Metric) -> str:
    """Returns the section of the metric against x; without x, by contender. Empty for runs without seeds."""
    if layout.by == (RUN,):
        return ""
    x = layout.x
    ticks = sorted((at, text) for text, at in layout.x_values.items()) or list(enumerate(layout.names))
    log = x is not None and log_spaced([at for at, _ in ticks])

    def draw(groups: Sequence[Group]) -> Iterator[Series]:
        for k, name in enumerate(layout.names):
            own = [(g, s) for g in groups if layout.contender(g) == k and (s := g.spread(metric.value))]
            places = [layout.x_values[g.value(x)] if x else k for g, _ in own]
            seeds = [g.numbers(metric.value).values() for g, _ in own]
            x_seeds = [at for at, of in zip(places, seeds, strict=True) for _ in of if len(of) > 1]
            if own:
                half = [s.deviation or 0.0 for _, s in own]
                yield Series(name, places, [s.mean for _, s in own], half, k, points=True)
            if x_seeds:
                y_seeds = [value for of in seeds for value in of if len(of) > 1]
                yield Series(f"{name}, seeds", x_seeds, y_seeds, style=k, points=True)

    name = x or " and ".join(layout.by) or "group"
    charts = Charts("against", x_name=f"{name} (log)" if log else name, x_log=log, x_ticks=ticks)
    words = "Error bars: one deviation over the seeds; small dots: the seeds."
    panels = _panels(charts, layout, layout.panel_keys, metric, draw)
    return section(f"Metric {'against' if x else 'by'} {name}", paragraph(words), *panels, charts.script())


def mean_curves(layout: SweepLayout, metric: Metric) -> str:
    """Returns sections of the mean curves of the metric, and of training metrics that a run has logged."""
    charts, sections = Charts("means"), []
    curves = [curve for group in layout.groups if (curve := group.curve(metric))]
    words = "Mean over the seeds and a band of one deviation."
    if not curves:
        words = "No group has seeds that were evaluated after the same samples."
    elif max(map(len, curves)) == 1:
        words += " Runs were evaluated once: evaluator.NAME.every=… evaluates during the run."
    metrics = [("Metric against samples seen", "", words), *_LOGGED]
    for title, name, note in metrics[2 if layout.by == (RUN,) else 0 :]:  # curves of single runs are those of all runs
        shown = Metric((name,)) if name else metric

        def draw(groups: Sequence[Group], shown: Metric = shown) -> Iterator[Series]:
            for group in groups:
                if curve := group.curve(shown):
                    x, mean, half = zip(*((p.samples, p.mean, p.deviation or 0.0) for p in curve), strict=True)
                    k = layout.contender(group)
                    yield Series(layout.names[k], x, mean, half, k)

        panels = _panels(charts, layout, layout.curve_keys, shown, draw)
        if (panels and name not in metric.names) or not name:
            sections.append(section(title, paragraph(note), "" if name else charts.controls(), *panels))
    return "".join(sections) + charts.script()


def _panels(charts: Charts, layout: SweepLayout, keys: Values, metric: Metric, draw: Draw) -> list[str]:
    """Returns a chart for each cell with series. Shares have the same vertical axis in all."""
    cells = [(cell, found) for cell, groups in layout.cells(keys).items() if (found := list(draw(groups)))]
    bars = [bar for _, found in cells for s in found for bar in zip(s.y, s.half or (), strict=False)]
    ends = [y + sign * half for y, half in bars for sign in (-1, 1)] if metric.share else []
    margin = 0.04 * (max(ends) - min(ends)) or 0.04 if ends else 0
    limits = (min(ends) - margin, max(ends) + margin) if ends else None
    shown = [
        charts.figure(Chart(cell or metric.label, found, metric.share, legend=len(found) > 1, limits=limits))
        for cell, found in cells[:_MOST_PANELS]
    ]
    first, further = shown[:_FIRST_PANELS], shown[_FIRST_PANELS:]
    parts = [f'<div class="charts {"few" if len(shown) < 3 else "fit"}">{"".join(first)}</div>'] if first else []
    if further:
        parts.append(details(f"{len(further)} further panels", f'<div class="charts">{"".join(further)}</div>'))
    if len(cells) > len(shown):
        parts.append(paragraph(f"{len(shown)} of {len(cells)} panels are drawn: the JSON document has all values."))
    return parts
