"""Parallel coordinates plot of a sweep: an axis for each override that varies, a line for each point, coloured by its
value of the metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from clipx.report.console import format_value
from clipx.report.figure import INK, MUTED, SURFACE, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_AXIS = "#d0d4d9"
_LABEL_GAP = 0.045  # smallest distance between two labels of an axis, as a share of the height
_LABEL_LENGTH = 16  # largest number of letters of a label
_FAN_WIDTH = 0.05  # spread of lines that cross an axis at the same value, as a share of the height
_LETTER = 0.075  # width of a letter in inches


@dataclass(frozen=True, slots=True)
class Line:
    """A point of the sweep: its varied overrides by key, and its value of the metric, if it has one."""

    values: Mapping[str, str]
    number: float | None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: the position of each line and of each label, between 0 and 1."""

    title: str
    positions: list[float | None]
    labels: list[tuple[float, str]]


def parse_numbers(texts: Sequence[str | None]) -> list[str | int | float | None]:
    """Parses all texts as integers, else all as floats, else returns the texts. None remains None."""
    for kind in (int, float):
        try:
            return [None if text is None else kind(text) for text in texts]
        except ValueError:
            continue
    return list(texts)


def draw(title: str, metric: str, lines: Sequence[Line], lowest: bool) -> bytes:
    """Returns a PNG. Points without a value are grey and dashed; the best is drawn last and wide."""
    from matplotlib.figure import Figure

    found = [line.number for line in lines]
    axes_of = axes_of_lines(metric, lines)
    before = 0.4 + _LETTER * max(len(text) for _, text in axes_of[0].labels)
    width = before + 1.9 * (len(axes_of) - 1) + 2.3
    figure = Figure(figsize=(max(width, 6), 5.4), dpi=110, facecolor=SURFACE)
    width = figure.get_figwidth()
    axes = figure.add_axes((before / width, 0.06, 1 - (before + 2.3) / width, 0.68))
    best = _draw_lines(figure, axes, axes_of, found, metric, lowest)
    _draw_axes(axes, axes_of)
    missing = found.count(None)
    subtitle = f"{metric} of {len(lines)} points" + (f", {missing} (dashed) without a value" if missing else "")
    subtitle += f"; best (wide): {_formatted(metric)(best)}" if best is not None else ""
    for y, text, colour, size in ((0.955, title, INK, 13), (0.905, subtitle, MUTED, 9)):
        figure.text(0.15 / width, y, text, color=colour, fontsize=size, va="center")
    return to_png(figure)


# -------------------------------------------------------------------------------------------------------- axes


def axes_of_lines(metric: str, lines: Sequence[Line]) -> list[Axis]:
    """Returns an axis for each override of the lines, and last that of the metric."""
    keys = list({key: None for line in lines for key in line.values})
    found = [override_axis(key, [line.values.get(key) for line in lines]) for key in keys]
    return [*found, _axis(_wrapped(metric), [line.number for line in lines], _formatted(metric))]


def override_axis(key: str, texts: Sequence[str | None]) -> Axis:
    """Returns the axis of an override: numbers by value, or by logarithm if that spaces them more evenly; else
    texts."""
    cells = parse_numbers(texts)
    known = sorted({float(cell) for cell in cells if isinstance(cell, int | float)})
    if None not in cells and known and not any(isinstance(cell, str) for cell in cells) and _finite(known):
        values = [float(cell) for cell in cells if isinstance(cell, int | float)]
        log = log_spaced(known)
        return _axis(_wrapped(key) + ("\n(log)" if log else ""), values, lambda value: f"{value:g}", log, known)
    names = sorted({text or "(not given)" for text in texts})
    at = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
    return Axis(_wrapped(key), [at[text or "(not given)"] for text in texts], [(at[n], _cut(n)) for n in names])


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def log_spaced(values: Sequence[float]) -> bool:
    """Returns True if sorted values are spaced more evenly by logarithm; for two values, if their ratio is >= 10."""
    if values[0] <= 0 or len(values) < 2:
        return False
    if len(values) == 2:
        return values[1] / values[0] >= 10
    steps = [b - a for a, b in pairwise(values)]
    ratios = [math.log(b / a) for a, b in pairwise(values)]
    return _relative_deviation(ratios) < _relative_deviation(steps)


def _relative_deviation(values: Sequence[float]) -> float:
    return statistics.pstdev(values) / statistics.mean(values)


def _axis(
    title: str,
    values: Sequence[float | None],
    text: Callable[[float], str],
    log: bool = False,
    labelled: Sequence[float] = (),
) -> Axis:
    """Returns an axis of numbers. Its labels are the values themselves if there are at most 9, else round numbers."""
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)

    def position(value: float) -> float:
        if low == high:
            return 0.5
        if log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    ticks = list(labelled) if 0 < len(labelled) <= 9 else _round(low, high, log)
    labels = drop_overlapping([(position(tick), text(tick)) for tick in ticks])
    return Axis(title, [None if value is None else position(value) for value in values], labels)


def _round(low: float, high: float, log: bool) -> list[float]:
    """Returns `low`, `high` and round numbers between them."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    locator = LogLocator(numticks=7) if log else MaxNLocator(5)
    inner = [float(tick) for tick in locator.tick_values(low, high) if low < tick < high] if low < high else []
    return [low, *([high] if low < high else []), *inner]


def drop_overlapping(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Drops labels that overlap an earlier one."""
    shown: list[tuple[float, str]] = []
    for at, text in labels:
        if all(abs(at - other) >= _LABEL_GAP for other, _ in shown):
            shown.append((at, text))
    return shown


def _formatted(metric: str) -> Callable[[float], str]:
    return lambda value: format_value(metric, value)


def _cut(text: str) -> str:
    return text if len(text) <= _LABEL_LENGTH else f"{text[: _LABEL_LENGTH - 1]}…"


def _wrapped(key: str) -> str:
    """Breaks a long name into lines before `.` and after `/`."""
    lines = [""]
    for part in key.replace(".", "\0.").replace("/", "/\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > _LABEL_LENGTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(_cut(line) for line in lines)


# ----------------------------------------------------------------------------------------------------- drawing


def _draw_axes(axes: Axes, axes_of: Sequence[Axis]) -> None:
    last = len(axes_of) - 1
    axes.set(xlim=(0, last), ylim=(-0.02, 1.02))
    axes.axis("off")
    for x, axis in enumerate(axes_of):
        axes.plot((x, x), (0, 1), color=_AXIS, lw=1.2, zorder=1, clip_on=False)
        axes.annotate(axis.title, (x, 1.0), (0, 10), textcoords="offset points", ha="center", color=INK, fontsize=9)
        for at, text in axis.labels:
            axes.plot((x,), (at,), "_", color=MUTED, ms=7, zorder=3, clip_on=False)
            axes.annotate(
                text, (x, at), (-6 if x < last else 6, 0), textcoords="offset points", va="center",
                ha="right" if x < last else "left", color=INK, fontsize=8, zorder=4,
                bbox={"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
            )  # fmt: skip


def _draw_lines(
    figure: Figure, axes: Axes, axes_of: Sequence[Axis], found: Sequence[float | None], metric: str, lowest: bool
) -> float | None:
    """Draws the lines and the colour bar. Returns the best value, or None if there is none."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    known = [number for number in found if number is not None]
    colours = ScalarMappable(Normalize(min(known, default=0), max(known, default=1)))
    colours.set_cmap("viridis" if lowest else "viridis_r")  # the best are dark
    sign = -1 if lowest else 1
    # The best last, of equal ones the first: it is the one that `clipx-sweep best` prints.
    order = sorted(range(len(found)), key=lambda i: (-math.inf if (n := found[i]) is None else sign * n, -i))
    fanned = [_fan_out(axis.positions, order) for axis in axes_of]
    for i in order:
        at = [(x, positions[i]) for x, positions in enumerate(fanned) if positions[i] is not None]
        number, wide = found[i], bool(known) and i == order[-1]
        axes.plot(
            *zip(*at, strict=True),
            color=MUTED if number is None else colours.to_rgba(np.array([number]))[0],
            lw=3.2 if wide else 1.4,
            ls="--" if number is None else "-",
            solid_capstyle="round",
            clip_on=False,
        )
    if known:
        _colour_bar(figure, colours, metric)
    return None if not known else min(known) if lowest else max(known)


def _fan_out(positions: Sequence[float | None], order: Sequence[int]) -> list[float | None]:
    """Spreads positions that several lines share, in the order of the lines' values."""
    groups: dict[float, list[int]] = {}
    for i in order:
        if (at := positions[i]) is not None:
            groups.setdefault(at, []).append(i)
    gap = min((b - a for a, b in pairwise(sorted(groups))), default=1.0)
    spread = list(positions)
    for at, group in groups.items():
        wide = min(_FAN_WIDTH, gap / 2, 0.01 * (len(group) - 1))
        for rank, i in enumerate(group):
            spread[i] = at + wide * (rank / max(1, len(group) - 1) - 0.5)
    return spread


def _colour_bar(figure: Figure, colours: ScalarMappable, metric: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    width = figure.get_figwidth()
    bar_axes = figure.add_axes((1 - 1.05 / width, 0.08, 0.14 / width, 0.64))
    ticks = MaxNLocator(5)
    bar = figure.colorbar(colours, cax=bar_axes, ticks=ticks, format=FuncFormatter(lambda v, _: _formatted(metric)(v)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8, length=2)
    bar.set_label(metric, color=MUTED, fontsize=8)
