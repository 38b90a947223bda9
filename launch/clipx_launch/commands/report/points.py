"""All points of the report, one by one: parallel coordinates, a table, and their curves over each other."""

from __future__ import annotations

import base64
import math
import textwrap
from collections.abc import Sequence

from clipx.report.chart import Chart, Charts, Series
from clipx.report.console import format_clock, format_value, is_share
from clipx.report.page import Cell, data_script, paragraph, section, table
from clipx_launch.commands.parallel_coordinates import Line, axes_of_lines, draw
from clipx_launch.commands.report.groups import SEED, Metric, numbers_of, seed_of
from clipx_launch.commands.report.layout import Layout
from clipx_launch.commands.run import Run

CHARTS = "points"
_MOST_POINTS = 60_000  # of all series of a chart
_NONE = "–"
_TITLE_WIDTH = 24  # letters of a line above an axis


class Points:
    """Sections of all points. `metrics`: those of the table, the report's first."""

    def __init__(self, title: str, runs: Sequence[Run], layout: Layout, metrics: Sequence[Metric]) -> None:
        self._title, self._runs, self._layout, self._metrics = title, runs, layout, metrics
        self._charts = Charts(CHARTS, most=max(20, min(400, _MOST_POINTS // len(runs))), each=True)
        self._values = [_varied(run) for run in runs]
        self._numbers = [metrics[0].value(run) for run in runs]

    def sections(self) -> str:
        """Returns the sections, with their data."""
        return self._compared() + self._curves() + self._charts.script()

    def _compared(self) -> str:
        """Returns parallel coordinates and the table."""
        lines = [Line(values, number) for values, number in zip(self._values, self._numbers, strict=True)]
        parts = [f'<div class="tall">{self._table()}</div>']
        if any(self._values):
            image = base64.b64encode(draw(self._title, self._metrics[0].label, lines, self._metrics[0].lowest)).decode()
            static = f'<img class="static" alt="parallel coordinates" src="data:image/png;base64,{image}">'
            parts[:0] = [static, '<figure class="parallel live"></figure>', self._parallel(lines)]
        return section("All points", *parts)

    def _parallel(self, lines: Sequence[Line]) -> str:
        metric = self._metrics[0]
        runs = [
            {
                "id": _id(i),
                "name": run.name,
                "state": run.state.value,
                "rank": self._rank(number),
                "values": [*values.items(), (metric.label, _NONE if number is None else _text(metric, number))],
            }
            for i, (run, values, number) in enumerate(zip(self._runs, self._values, self._numbers, strict=True))
        ]
        keys = dict.fromkeys(key for line in lines for key in line.values)
        axes = [
            {
                "title": textwrap.wrap(name.removeprefix("eval/"), _TITLE_WIDTH),
                "labels": axis.labels,
                "at": [None if at is None else round(at, 4) for at in axis.positions],
            }
            for name, axis in zip((*keys, metric.label), axes_of_lines(metric.label, lines), strict=True)
        ]
        return data_script("parallel", {"axes": axes, "runs": runs, "charts": CHARTS})

    def _rank(self, number: float | None) -> float | None:
        """Returns the place of a value between the worst, 0, and the best, 1."""
        if number is None:
            return None
        known = [other for other in self._numbers if other is not None]
        low, high = min(known), max(known)
        share = (number - low) / (high - low) if high > low else 1.0
        return round(1 - share if self._metrics[0].lowest else share, 4)

    def _table(self) -> str:
        """Returns a row for each point: overrides, state, metrics, loss, step, throughput, time."""
        keys = list({key: None for values in self._values for key in values})
        rows: list[list[Cell | str]] = []
        for run, values in zip(self._runs, self._values, strict=True):
            found = [(metric, metric.value(run)) for metric in self._metrics]
            rows.append([
                _override(run.name),
                *(_override(values.get(key)) for key in keys), run.state.value,
                *(Cell(_NONE) if value is None else Cell(_text(metric, value), value) for metric, value in found),
                *_progress(run),
            ])  # fmt: skip
        named = [metric.label.removeprefix("eval/") for metric in self._metrics]
        numeric = [*named, "loss", "step", "samples/s", "time"]
        return table(["point", *keys, "state", *numeric], rows, len(numeric), list(map(_id, range(len(rows)))))

    def _curves(self) -> str:
        """Returns the curves of all points over each other: the metric, and the training loss."""
        metric, loss = self._metrics[0], Metric(("train/loss",), lowest=True)
        charts = [chart for found in dict.fromkeys((metric, loss)) if (chart := self._chart(found)).series]
        if not charts:
            return ""
        colours = "of its contender" if len(self._layout.contenders) > 1 else "of its final value, as above"
        words = f"A curve for each point, in the colour {colours}. The one under the pointer is highlighted."
        figures = "".join(map(self._charts.figure, charts))
        return section(
            "Curves of all points", f'<div class="live">{paragraph(words)}</div>', self._charts.controls(),
            f'<div class="charts few">{figures}</div>', '<p class="static">Shown by a browser that runs scripts.</p>',
        )  # fmt: skip

    def _chart(self, metric: Metric) -> Chart:
        series, ranked = [], len(self._layout.contenders) == 1
        for i, (run, values) in enumerate(zip(self._runs, self._values, strict=True)):
            points = sorted(metric.curve(run), key=lambda point: point[0])
            if points:
                name = " ".join(f"{key}={value}" for key, value in values.items()) or run.name
                x, y = [at for at, _ in points], [value for _, value in points]
                rank = self._rank(self._numbers[i]) if ranked else None
                series.append(Series(name, x, y, style=6 if ranked else self._contender(run), run=_id(i), rank=rank))
        smooth = metric.names[0].startswith("train/")
        return Chart(metric.label, series, share=is_share(metric.names[0]), smooth=smooth, legend=False)

    def _contender(self, run: Run) -> int:
        """Returns the number of the contender of a point, which chooses its colour."""
        overrides = {key: value for key, value in run.varied.items() if key != SEED}
        group = next((group for group in self._layout.groups if group.overrides == overrides), None)
        return 0 if group is None else self._layout.contender(group)


def _id(number: int) -> str:
    return f"r{number}"


def _varied(run: Run) -> dict[str, str]:
    """Returns the overrides of a point that vary, the seed last."""
    seed = {SEED: seed_of(run)} if SEED in run.varied else {}
    return {**{key: value for key, value in run.varied.items() if key != SEED}, **seed}


def _override(value: str | None) -> Cell:
    return Cell(_NONE) if value is None else Cell(value, (numbers_of([value]) or {}).get(value))


def _text(metric: Metric, value: float) -> str:
    return format_value(metric.names[0], value)


def _progress(run: Run) -> list[Cell]:
    loss, rate = run.last.get("train/loss"), run.samples_per_second
    return [
        Cell(_NONE) if loss is None else Cell(format_value("", loss), loss if math.isfinite(loss) else None),
        Cell(f"{run.last['step']:,.0f}", run.last["step"]) if run.last else Cell(_NONE),
        Cell(_NONE) if rate is None else Cell(f"{rate:,.0f}", rate),
        Cell(format_clock(run.seconds), run.seconds),
    ]
