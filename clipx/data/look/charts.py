"""Histograms as inline SVG, in the colours of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clipx.data.look.findings import percent
from clipx.data.look.hashing import Numbers
from clipx.report.page import text

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360, 150, 14, 16, 20
_WIDEST = 40  # of a bar
_MOST_BINS = 30
_MOST_LABELS = 6


@dataclass(frozen=True, slots=True)
class Bin:
    """Values from `low` to `high`, both included; `high` None: without an upper end."""

    low: int
    high: int | None
    count: int

    @property
    def label(self) -> str:
        if self.high is None:
            return f"{self.low:,} and more"
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


def bins(values: Numbers, edge: int | None = None) -> list[Bin]:
    """Returns at most 30 bins of whole numbers of equal round width; the last one has the largest 1 % if they are far.

    `edge`: a number that is the upper end of a bin, if it is in the range of the bins.
    """
    if not len(values):
        return []
    low, top, far = int(values.min()), int(np.quantile(values, 0.99, method="higher")), int(values.max())
    step = _round_step((top - low + 1) / (_MOST_BINS - 3))
    start = low // step * step
    if edge is not None:
        start = low - (low - edge - 1) % step
    edges = np.arange(start, top + step + 1, step)
    counts = np.histogram(np.minimum(values, edges[-1]), [*edges, edges[-1] + 1])[0].tolist()
    found = [Bin(max(0, int(e)), int(e) + step - 1, count) for e, count in zip(edges[:-1], counts[:-1], strict=True)]
    return [*found, Bin(int(edges[-1]), None, counts[-1])] if far >= edges[-1] else found


def _round_step(least: float) -> int:
    """Returns the smallest of 1, 2, 5, 10, 20, 50, … that is at least `least`."""
    scale: int = 10 ** max(0, math.floor(math.log10(max(least, 1))))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= least)


def histogram(title: str, unit: str, shown: Sequence[Bin], above: int | None = None, mark: str = "") -> str:
    """Returns a figure with the bins. Those above `above` are in the colour of warnings, with `mark` as the reason."""
    if not shown:
        return ""
    total, most = sum(b.count for b in shown), max(b.count for b in shown)
    width = min((_WIDTH - 2 * _LEFT) / len(shown), _WIDEST)
    plot = _HEIGHT - _TOP - _BOTTOM
    parts = []
    for place, b in enumerate(shown):
        height = plot * b.count / most if b.count else 0
        kind = "bar over" if above is not None and b.low > above else "bar"
        x, y = _LEFT + place * width, _TOP + plot - height
        parts.append(
            f'<g><rect class="hit" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{plot}"/>'
            f'<rect class="{kind}" x="{x + 0.5:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" '
            f'height="{height:.1f}"/><title>{b.label} {text(unit)}: {b.count:,} ({percent(b.count, total)})</title></g>'
        )
    places = range(0, len(shown), math.ceil(len(shown) / _MOST_LABELS))
    at = f'y="{_HEIGHT - 6}" text-anchor="middle"'
    parts += [f'<text x="{_LEFT + (i + 0.5) * width:.1f}" {at}>{shown[i].low:,}</text>' for i in places]
    edge = next((place for place, b in enumerate(shown) if above is not None and b.low > above), None)
    if edge is not None:
        x = _LEFT + edge * width
        anchor = "end" if x > _WIDTH / 2 else "start"
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{_TOP + plot}"/>')
        parts.append(
            f'<text class="mark" x="{x - 3 if anchor == "end" else x + 3:.1f}" y="{_TOP - 5}" text-anchor="{anchor}">'
            f"{text(mark)}</text>"
        )
    axis = f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{_TOP + plot}" y2="{_TOP + plot}"/>'
    label = f'role="img" aria-label="{text(title)}"'
    return (
        f"<figure><figcaption>{text(title)}</figcaption>"
        f'<svg class="histogram" viewBox="0 0 {_WIDTH} {_HEIGHT}" {label}>{"".join(parts)}{axis}</svg></figure>\n'
    )


def bars(rows: Sequence[tuple[str, int]], total: int) -> str:
    """Returns horizontal bars of named counts, with their shares of `total`."""
    most = max((count for _, count in rows), default=1) or 1
    lines = "".join(
        f'<div class="name">{text(name)}</div>'
        f'<div class="track"><div style="width:{100 * count / most:.1f}%"></div></div>'
        f'<div class="n">{count:,}</div><div class="n muted">{percent(count, total)}</div>\n'
        for name, count in rows
    )
    return f'<div class="bars">\n{lines}</div>'
