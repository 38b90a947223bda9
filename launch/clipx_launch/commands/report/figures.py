"""Panels of the report, each an <svg> element: curves, metric against a number, metric by contender."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from clipx.escape import escaped
from clipx.report.console import is_share
from clipx.report.figure import COLOURS, INK, MUTED, SeriesStyle, new_figure, series_style, style_axes, to_svg
from clipx.report.seed_statistics import CurvePoint, Spread
from clipx_launch.commands.parallel_coordinates import log_spaced

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = 3.9, 2.6  # inches
SWATCH = "swatch"  # prefix of the ids of a legend
_DODGE = 0.012  # distance between the points of two series, as a share of the axis


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean curve of a contender, by its number."""

    contender: int
    points: Sequence[CurvePoint]


@dataclass(frozen=True, slots=True)
class Dot:
    """Metric of a contender at a place of the horizontal axis, with the values of its seeds."""

    contender: int
    x: float
    spread: Spread
    values: Sequence[float]


class Panels:
    """Draws panels with ids that are unique in a page. The artists of contender k have the class `sk`."""

    def __init__(self) -> None:
        self._numbers, self._gids = count(1), count(1)

    def curves(self, curves: Sequence[Curve], metric: str, limits: tuple[float, float] | None = None) -> str:
        """Returns curves against samples seen, with a band of one deviation. `limits`: of the vertical axis."""
        figure, axes = self._axes(metric)
        axes.set_xlabel("samples seen", color=MUTED, fontsize=8)
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        factor = 100 if is_share(metric) else 1
        for curve in curves:
            style = series_style(curve.contender)
            x = [point.samples for point in curve.points]
            y = [factor * point.mean for point in curve.points]
            half = [factor * (point.deviation or 0) for point in curve.points]
            if any(half):
                low, high = ([a + sign * b for a, b in zip(y, half, strict=True)] for sign in (-1, 1))
                self._tag(curve.contender, axes.fill_between(x, low, high, color=style.colour, alpha=0.17, lw=0))
            every = max(1, len(x) // 8)
            first = curve.contender % len(COLOURS) * every // len(COLOURS)  # markers of equal curves stay visible
            line = axes.plot(x, y, **_line(style), markevery=(first, every), ms=3.5, lw=1.3)
            self._tag(curve.contender, *line)
        if limits is not None:
            axes.set_ylim(factor * limits[0], factor * limits[1])
        return self._svg(figure)

    def against(self, dots: Sequence[Dot], name: str, metric: str, limits: tuple[float, float]) -> str:
        """Returns the metric against a number, with error bars of one deviation. `name`: of the horizontal axis."""
        figure, axes = self._axes(metric)
        places = sorted({dot.x for dot in dots})
        contenders = sorted({dot.contender for dot in dots})
        log = log_spaced(places)
        if log:
            axes.set_xscale("log")
        span = places[-1] / places[0] if log else places[-1] - places[0] or 1.0
        factor = 100 if is_share(metric) else 1
        for rank, contender in enumerate(contenders):
            shift = _DODGE * (rank - (len(contenders) - 1) / 2)
            own = sorted((dot for dot in dots if dot.contender == contender), key=lambda dot: dot.x)
            x = [dot.x * span**shift if log else dot.x + shift * span for dot in own]
            self._error_bars(axes, contender, x, own, factor)
            self._seeds(axes, contender, x, own, factor)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
        axes.set_xlabel(escaped(name) + (" (log)" if log else ""), color=MUTED, fontsize=8)
        axes.set_ylim(factor * limits[0], factor * limits[1])
        return self._svg(figure)

    def _error_bars(self, axes: Axes, contender: int, x: Sequence[float], dots: Sequence[Dot], factor: float) -> None:
        style = series_style(contender)
        y = [factor * dot.spread.mean for dot in dots]
        bars = [factor * (dot.spread.deviation or 0) for dot in dots]
        line, caps, lines = axes.errorbar(x, y, bars, **_line(style), ms=4, lw=1.1, elinewidth=1, capsize=2)
        self._tag(contender, line, *caps, *lines)

    def _seeds(self, axes: Axes, contender: int, x: Sequence[float], dots: Sequence[Dot], factor: float) -> None:
        """Draws the values of the seeds as small dots where there are several."""
        several = [(at, dot) for at, dot in zip(x, dots, strict=True) if dot.spread.n > 1]
        places = [(at, factor * value) for at, dot in several for value in dot.values]
        if places:
            colour = series_style(contender).colour
            self._tag(contender, *axes.plot(*zip(*places, strict=True), ".", color=colour, ms=3, alpha=0.5))

    def by_contender(self, dots: Sequence[Dot], names: Sequence[str], metric: str) -> str:
        """Returns the metric of each contender as a row: the mean with its deviation, below it the seeds as dots."""
        figure, axes = self._axes(metric, height=0.75 + 0.24 * len(dots), horizontal=True)
        factor = 100 if is_share(metric) else 1
        for row, dot in enumerate(dots):
            style = series_style(dot.contender)
            places = [factor * value for value in dot.values], [row + 0.25] * len(dot.values)
            (seeds,) = axes.plot(*places, ".", color=style.colour, ms=4, alpha=0.6)
            mean, half = factor * dot.spread.mean, factor * (dot.spread.deviation or 0)
            line, caps, lines = axes.errorbar([mean], [row], xerr=[half], **_line(style), ms=5, elinewidth=1.4)
            self._tag(dot.contender, seeds, line, *caps, *lines)
        axes.set_yticks(range(len(dots)), [_cut(names[dot.contender]) for dot in dots], color=INK)
        axes.set_ylim(len(dots) - 0.5, -0.5)
        return self._svg(figure)

    def _axes(self, metric: str, height: float = _SIZE[1], horizontal: bool = False) -> tuple[Figure, Axes]:
        figure = new_figure("", _SIZE[0], height)
        axes = figure.subplots()
        style_axes(axes, "")
        text = escaped(metric.removeprefix("eval/")) + (", %" if is_share(metric) else "")
        (axes.set_xlabel if horizontal else axes.set_ylabel)(text, color=MUTED, fontsize=7 if len(text) > 30 else 8)
        return figure, axes

    def _tag(self, contender: int, *artists: Artist) -> None:
        for artist in artists:
            artist.set_gid(f"s{contender}--{next(self._gids)}")

    def _svg(self, figure: Figure) -> str:
        return to_svg(figure, f"f{next(self._numbers)}")


def swatch(contender: int) -> str:
    """Returns the line and the marker of a contender as a small <svg> for the legend. SWATCH begins its ids."""
    style = series_style(contender)
    figure = new_figure("", 0.42, 0.17)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.plot([0, 1, 2], [0, 0, 0], **_line(style), markevery=[1], ms=5, lw=1.6)
    return to_svg(figure, f"{SWATCH}{contender}")


def limits_of(spreads: Iterable[Spread | CurvePoint]) -> tuple[float, float]:
    """Returns vertical limits that contain all means and deviations, with a margin of 4 %."""
    ends = [s.mean + sign * (s.deviation or 0) for s in spreads for sign in (-1, 1)]
    low, high = min(ends), max(ends)
    margin = 0.04 * (high - low) or 0.04 * abs(high) or 0.04
    return low - margin, high + margin


def short_number(value: float) -> str:
    """Formats a number of samples: 500, 12k, 1.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"


def _line(style: SeriesStyle) -> dict[str, Any]:
    return {"color": style.colour, "marker": style.marker, "linestyle": style.dashes}


def _cut(text: str) -> str:
    text = escaped(text)
    return text if len(text) <= 26 else f"{text[:13]}…{text[-12:]}"
