"""Plots evaluations as PNG: the sets of one model, the steps of a run, or several models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from clipx.evaluator.tables import AVERAGE, DROP, OTHERS, Evaluated
from clipx.report.console import is_headline, of_samples
from clipx.report.figure import COLOURS, INK, MUTED, SURFACE, new_figure, style_axes, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clipx.evaluator.suite import Suite

_STYLES = ("-", "--", ":", "-.")

Rows = Mapping[str, Mapping[str, float]]
"""{set: {metric: value}}."""


def plot_sets(title: str, tables: Mapping[str, Rows]) -> bytes:
    """Plots a panel per evaluator with a bar per set, and a line at the value of the first set. Returns a PNG."""
    figure = new_figure(title, 6.0 * len(tables), _height(max(map(len, tables.values()))))
    for axes, (name, rows) in zip(_axes(figure, len(tables)), tables.items(), strict=True):
        metric = next(iter(rows[AVERAGE]))
        first = next(iter(rows))
        drops = {label: "" if label == first else f"  ({-100 * row[DROP]:+.1f})" for label, row in rows.items()}
        lines = {label: of_samples(metric, row) + drops[label] for label, row in rows.items()}
        values = {label: 100 * row[metric] for label, row in rows.items()}
        _bars(axes, f"{name}: {metric}, %", values, lines)
        axes.axvline(values[first], color=COLOURS[1], lw=1.2, ls="--", zorder=1)
    return to_png(figure)


def plot_steps(title: str, found: Sequence[Evaluated]) -> bytes:
    """Plots a panel per evaluator with the headline metrics of each model over the steps. Returns a PNG."""
    panels = _by_evaluator(found)
    figure = new_figure(title, 6.0 * len(panels), 4.2)
    models = list(dict.fromkeys(one.model for one in found))
    for axes, (evaluator, names) in zip(_axes(figure, len(panels)), panels.items(), strict=True):
        style_axes(axes, f"{evaluator}, %")
        axes.set_xlabel("step", color=MUTED, fontsize=9)
        for k, model in enumerate(models):
            for i, name in enumerate(names):
                points = [
                    (one.step, 100 * one.numbers[name]) for one in found if one.model == model and name in one.numbers
                ]
                short = name.removeprefix(f"eval/{evaluator}/") + of_samples(name, found[-1].numbers)
                axes.plot(
                    *zip(*points, strict=True) if points else ((), ()),
                    marker="o",
                    ms=4,
                    lw=1.6,
                    color=COLOURS[i % len(COLOURS)],
                    ls=_STYLES[k % len(_STYLES)],
                    label=f"{model} {short}" if len(models) > 1 else short,
                )
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return to_png(figure)


def plot_models(title: str, found: Sequence[Evaluated], suite: Suite) -> bytes:
    """Plots a panel per evaluator with a point per model: the first set against the mean of the others. Returns a PNG.

    A line marks equal values. An evaluator with a single set gets a bar per model instead.
    """
    sets = suite.compared()
    height = 4.6 if any(len(names) > 1 for names in sets.values()) else _height(len(found))
    figure = new_figure(title, 6.0 * len(sets), height)
    for axes, (evaluator, names) in zip(_axes(figure, len(sets)), sets.items(), strict=True):
        first, *others = names
        shown = [one for one in found if all(name in one.numbers for name in names.values())]
        metric = suite.evaluators[evaluator].compared[0]
        if not others:
            bars = {one.label: 100 * one.numbers[names[first]] for one in shown}
            lines = {one.label: of_samples(names[first], one.numbers) for one in shown}
            _bars(axes, f"{evaluator}, {first}: {metric}, %", bars, lines)
            continue
        style_axes(axes, f"{evaluator}: {metric}")
        of = {
            label: f"{label}, %{of_samples(name, shown[0].numbers if shown else {})}" for label, name in names.items()
        }
        axes.set_xlabel(of[first], color=MUTED, fontsize=9)
        rest = ", ".join(of[label] for label in others) if len(others) < 3 else f"{len(others)} others, %"
        axes.set_ylabel(rest if len(others) == 1 else f"mean of {rest}", color=MUTED, fontsize=9)
        points = [[100 * one.numbers[name] for name in names.values()] for one in shown]
        places = [(x, sum(ys) / len(ys)) for x, *ys in points]
        top = 1.1 * max((max(place) for place in places), default=1.0) + 1e-9
        axes.plot((0, top), (0, top), color=MUTED, lw=1, ls="--", label="no drop")
        axes.set(xlim=(0, top), ylim=(0, top))
        for i, (one, place) in enumerate(zip(shown, places, strict=True)):
            axes.plot(*place, marker="o", ms=7, ls="", color=COLOURS[i % len(COLOURS)], label=one.label)
        axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return to_png(figure)


def _bars(axes: Axes, title: str, values: Mapping[str, float], lines: Mapping[str, str]) -> None:
    """Draws a bar per label, annotated with its value and the text of `lines`."""
    style_axes(axes, title)
    places = range(len(values), 0, -1)
    colours = [MUTED if label in (AVERAGE, OTHERS) else COLOURS[0] for label in values]
    axes.barh(places, list(values.values()), height=0.62, color=colours)
    axes.set_yticks(list(places), labels=list(values))
    axes.set_xlim(0, 1.4 * max(values.values(), default=0) + 1e-9)
    axes.grid(visible=False, axis="y")
    for place, (label, value) in zip(places, values.items(), strict=True):
        text = axes.annotate(
            f"{value:.1f}{lines.get(label, '')}".replace("-", "−"),
            (value, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        text.set_bbox({"facecolor": SURFACE, "edgecolor": "none", "pad": 1})  # hides the line behind the text


def _by_evaluator(found: Sequence[Evaluated]) -> dict[str, list[str]]:
    """Returns {evaluator: names of its headline metrics}."""
    names = dict.fromkeys(name for one in found for name in one.numbers if is_headline(name))
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(name.split("/")[1], []).append(name)
    return panels


def _height(rows: int) -> float:
    return 1.3 + 0.36 * rows


def _axes(figure: Figure, number: int) -> Iterator[Axes]:
    return iter(figure.subplots(1, number, squeeze=False).flat)
