"""Plots panels of curves as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clipx.report.figure import COLOURS, INK, MUTED, new_figure, style_axes, to_png


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel of a plot."""

    title: str
    x: str  # label of the x axis
    curves: Mapping[str, Sequence[tuple[float, float]]]  # points by label
    log: bool = False  # logarithmic x axis with base 2


def draw(title: str, panels: Sequence[Panel], columns: int) -> bytes:
    """Returns the plot as PNG. Linear axes begin at 0. The ticks of x are at the measured values."""
    rows = -(-len(panels) // columns)
    figure = new_figure(title, 4 * columns, 3.2 * rows)
    known: list[str] = []  # labels of the last legend
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        style_axes(axes, panel.title)
        axes.set_xlabel(panel.x, color=MUTED, fontsize=8)
        for i, (label, points) in enumerate(panel.curves.items()):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, lw=1.6, color=colour, label=label)
        if panel.log:
            axes.set_xscale("log", base=2)
        else:
            axes.set_xlim(left=0)
        ticks = sorted({x for points in panel.curves.values() for x, _ in points})
        axes.set_xticks(ticks, labels=[f"{x:,g}" for x in ticks] if panel.log else None)
        axes.set_ylim(bottom=0)
        if panel.curves and known != list(panel.curves):
            known = list(panel.curves)
            axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    return to_png(figure)
