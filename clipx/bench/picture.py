"""Panels of curves as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SURFACE, _INK, _MUTED, _GRID = "#ffffff", "#1f2328", "#656d76", "#e6e8eb"
_COLOURS = ("#2f6fde", "#d9622b", "#2a9d6f", "#8a4fc7", "#b08a00", "#c2417c")


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x: str
    curves: Mapping[str, Sequence[tuple[float, float]]]  # by the label they are drawn with
    log: bool = False  # whether x doubles from tick to tick
    log_y: bool = False


def draw(title: str, panels: Sequence[Panel], columns: int) -> bytes:
    """Axes begin at zero, unless they are logarithmic: what grows linearly looks so. Ticks are where something was
    measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * rows), dpi=110, facecolor=_SURFACE, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, color=_INK, x=0.01, ha="left", fontsize=12)
    known: list[str] = []  # the labels of the last legend
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        axes.set_title(panel.title, loc="left", fontsize=10, color=_INK)
        axes.set_xlabel(panel.x, color=_MUTED, fontsize=8)
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GRID)
        axes.tick_params(colors=_MUTED, labelsize=8)
        for i, (label, points) in enumerate(panel.curves.items()):
            colour = _COLOURS[i % len(_COLOURS)]
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, lw=1.6, color=colour, label=label)
        if panel.log:
            axes.set_xscale("log", base=2)
        else:
            axes.set_xlim(left=0)
        ticks = sorted({x for points in panel.curves.values() for x, _ in points})
        axes.set_xticks(ticks, labels=[f"{x:,g}" for x in ticks] if panel.log else None)
        if panel.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        if panel.curves and known != list(panel.curves):
            known = list(panel.curves)
            axes.legend(fontsize=8, frameon=False, labelcolor=_INK)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()
