"""Interactive charts of HTML pages: values over samples or another axis, drawn by chart.js from data in the page.

A long series is reduced to the smallest and the largest value of equal parts, so that spikes remain visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from clipx.report.page import data_script, text

MOST_POINTS = 1200  # of a series
_MOST_MARKS = 100  # non-finite values of a series that are marked


@dataclass(frozen=True, slots=True)
class Series:
    """Values `y` at ascending `x`. Values that are not finite are marked on the axis.

    `half`: half of the height of a band around the values. `style`: number of the colour and line style. `run`: id of
    the run of the series, for highlighting it in several charts. `rank`: colours the series by its place between the
    worst run, 0, and the best, 1, instead of by `style`. `points`: draws markers with error bars of `half` instead of a
    line with a band.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    half: Sequence[float] | None = None
    style: int = 0
    run: str | None = None
    rank: float | None = None
    points: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Series with a common vertical axis.

    `share`: values are shown in percent. `zero`: the axis includes 0. `log`: it is logarithmic at first. `smooth`: the
    page's control smooths the series. `legend`: a name for each series, below the chart. `limits`: of its axis.
    """

    title: str
    series: Sequence[Series] = ()
    share: bool = False
    zero: bool = False
    log: bool = False
    smooth: bool = False
    legend: bool = True
    limits: tuple[float, float] | None = None


@dataclass(slots=True)
class Charts:
    """Charts of a page with a common horizontal axis, zoom and crosshair.

    `axes`: ascending values of further horizontal axes by name, at the values of `samples`. `marks`: (samples, text) of
    events. `most`: largest number of points of a series. `each` series is a run: the page highlights the nearest one.

    `x_name`: of the horizontal axis; only that of `samples` includes 0. `x_log`: it is logarithmic, without places
    that are not positive. `x_ticks`: (place, label) of its only labels, such as the values of an option.
    """

    name: str
    axes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    marks: Sequence[tuple[float, str]] = ()
    most: int = MOST_POINTS
    each: bool = False
    x_name: str = "samples"
    x_log: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()
    _charts: list[dict[str, Any]] = field(default_factory=list)
    _places: dict[tuple[float, ...], int] = field(default_factory=dict)

    def figure(self, chart: Chart) -> str:
        """Adds a chart. Returns its place in the page, as HTML."""
        number = len(self._charts)
        names = ("share", "zero", "log", "smooth", "legend", "limits")
        options = {name: value for name in names if (value := getattr(chart, name))}
        self._charts.append({"title": chart.title, **options, "series": [self._encoded(s) for s in chart.series]})
        return f'<figure class="chart" data-group="{text(self.name)}" data-chart="{number}"></figure>\n'

    def controls(self) -> str:
        """Returns the place of the controls of all charts: horizontal axis, smoothing."""
        return f'<div class="controls" data-group="{text(self.name)}"></div>\n'

    def script(self) -> str:
        """Returns the data of all charts, for the end of the page."""
        axes = {name: [_short(value, 9) for value in values] for name, values in self.axes.items()}
        found = {"axes": axes, "marks": self.marks, "each": self.each, "charts": self._charts}
        found |= {"xName": self.x_name, "xLog": self.x_log, "xTicks": self.x_ticks, "places": list(self._places)}
        return data_script(f"charts-{self.name}", found)

    def _encoded(self, series: Series) -> dict[str, Any]:
        """Returns a series as JSON data. Equal lists of x are stored once, in `places`."""
        x, y = np.asarray(series.x, float), np.asarray(series.y, float)
        shown = x > 0 if self.x_log else np.isfinite(x)
        finite = np.isfinite(y) & shown
        bad = x[~finite & shown]
        half = None if series.half is None else np.asarray(series.half, float)[finite]
        x, y = x[finite], y[finite]
        chosen = spikes(y, self.most)
        found: dict[str, Any] = {"name": series.name, "style": series.style}
        found |= {"x": self._place(x[chosen]), "y": _shorts(y[chosen])}
        optional = {"run": series.run, "rank": series.rank, "points": series.points or None}
        found |= {name: value for name, value in optional.items() if value is not None}
        if half is not None and half.any():
            found["half"] = _shorts(half[chosen])
        if len(chosen) < len(y):
            mean_x, mean_y = (part_means(values, self.most // 2) for values in (x, y))
            found |= {"mean_x": self._place(mean_x), "mean_y": _shorts(mean_y), "of": len(y)}
        if len(bad):
            found |= {"bad": _shorts(bad[spikes(bad, _MOST_MARKS)], 9), "bads": len(bad)}
        return found

    def _place(self, x: np.ndarray) -> int:
        return self._places.setdefault(tuple(_shorts(x, 9)), len(self._places))


def spikes(values: np.ndarray, most: int) -> np.ndarray:
    """Returns the ascending indices of at most `most` values (at least 4): all if these are no more.

    Otherwise the first, the last, and the smallest and the largest of each of `most` / 2 - 1 parts of equal length.
    """
    n = len(values)
    if n <= most:
        return np.arange(n)
    bounds = np.linspace(0, n, most // 2).astype(int)
    parts = [values[a:b] for a, b in pairwise(bounds)]
    extremes = [bounds[i] + k for i, part in enumerate(parts) for k in (int(part.argmin()), int(part.argmax()))]
    return np.unique([0, *extremes, n - 1])


def part_means(values: np.ndarray, parts: int) -> np.ndarray:
    """Returns the means of `parts` parts of equal length of at least as many values."""
    bounds = np.linspace(0, len(values), parts + 1).astype(int)
    return np.add.reduceat(values, bounds[:-1]) / np.diff(bounds)


def _shorts(values: np.ndarray, digits: int = 5) -> list[float]:
    return [_short(value, digits) for value in values.tolist()]


def _short(value: float, digits: int) -> float:
    """Rounds to significant digits; integers become int, which JSON writes without `.0`."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
