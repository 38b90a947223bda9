"""Run report: report.png with the curves; report.html also with the final metrics and the configuration."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.escape import escaped
from clipx.logger import Row
from clipx.report.console import format_value, is_headline
from clipx.report.figure import COLOURS, GRID, INK, MUTED, SURFACE, new_figure, style_axes, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_report(folder: Path, name: str, rows: Sequence[Row], final: Mapping[str, float], config: str) -> None:
    """Writes report.png and report.html from the rows of metrics.jsonl."""
    picture = draw(name, rows)
    (folder / "report.png").write_bytes(picture)
    (folder / "report.html").write_text(_page(name, picture, final, config), encoding="utf-8")


def draw(name: str, rows: Sequence[Row]) -> bytes:
    """Returns the curves as PNG: loss, evaluation, learning rate, temperature, throughput, gradient norm."""
    figure = new_figure(name, 12, 6.4)
    panels = figure.subplots(2, 3).flat
    evaluated = _evaluated(rows)
    for axes, (title, series) in zip(
        panels,
        (
            ("loss", {"loss": "train/loss"}),
            ("held out", evaluated),
            ("throughput, samples/s", {"samples/s": "train/samples_per_second"}),
            ("learning rate", {"lr": "train/lr"}),
            ("temperature", {"τ": "train/temperature"}),
            ("gradient norm", {"norm": "train/grad_norm"}),
        ),
        strict=True,
    ):
        _panel(axes, title, series, rows)
    return to_png(figure)


def _evaluated(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the headline metrics of the evaluators, by their labels in the figure."""
    names = sorted({name for row in rows for name in row if name.startswith("eval/")})
    return {n.removeprefix("eval/"): n for n in names if is_headline(n)}


def _panel(axes: Axes, title: str, series: Mapping[str, str], rows: Sequence[Row]) -> None:
    style_axes(axes, title)
    axes.set_xlabel("step", color=MUTED, fontsize=8)
    axes.set_xlim(0, 1.03 * max((row["step"] for row in rows), default=1))
    for colour, (label, name) in zip(COLOURS, series.items(), strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row]
        marker = "o" if len(points) < 12 else ""
        axes.plot(
            *zip(*points, strict=True) if points else ((), ()), marker=marker, ms=4, lw=1.6, color=colour, label=label
        )
    if title == "held out":
        axes.set_ylim(0, 1.02)
    elif title.startswith("throughput"):
        axes.set_ylim(bottom=0)  # otherwise noise looks like change
    if len(series) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=INK)
    if not any(name in row for row in rows for name in series.values()):
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)


def _escape(text: str, keep: str = "") -> str:
    return html.escape(escaped(text, keep))


def _page(name: str, picture: bytes, final: Mapping[str, float], config: str) -> str:
    cells = "".join(
        f"<tr><td>{_escape(key)}</td><td class=n>{format_value(key, value)}</td></tr>" for key, value in final.items()
    )
    title = _escape(name)
    image = base64.b64encode(picture).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; background: {SURFACE}; max-width: 1100px;
        margin: 2rem auto; padding: 0 1rem }}
img {{ width: 100%; height: auto }}
table {{ border-collapse: collapse }}
td {{ padding: .2rem 1rem .2rem 0; border-bottom: 1px solid {GRID} }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }}
pre {{ background: #f6f8fa; padding: 1rem; overflow-x: auto; font-size: 13px }}
</style></head><body>
<h1>{title}</h1>
<table>{cells}</table>
<img alt="curves of the run" src="data:image/png;base64,{image}">
<h2>Configuration</h2>
<pre>{_escape(config, keep=chr(10))}</pre>
</body></html>
"""
