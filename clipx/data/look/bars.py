"""Counts as horizontal bars with their shares, and histograms of whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from clipx.data.duplicates import Numbers
from clipx.report.page import text


def percent(count: int, total: int) -> str:
    """Returns a share as `0.6%`; `–` of nothing."""
    share = 100 * count / max(1, total)
    shown = f"{share:.0f}%" if share >= 10 else "< 0.01%" if 0 < share < 0.01 else f"{share:.2g}%"
    return shown if total else "–"


def bars(title: str, rows: Iterable[tuple[str, int]], total: int, over: int = 0) -> str:
    """Returns counts by name, which is HTML, as bars with their shares of `total`. Those of 0 are left out.

    The last `over` rows are in the colour of warnings.
    """
    counted = [*rows]
    most, first = max((count for _, count in counted), default=0), len(counted) - over
    lines = "".join(
        f'<span>{name}</span><div{" class=over" * (place >= first)} style="width:{100 * count / most:.1f}%"></div>'
        f"<span>{count:,}</span><span>{percent(count, total)}</span>\n"
        for place, (name, count) in enumerate(counted)
        if count
    )
    return f'<figure><figcaption>{text(title)}</figcaption><div class="bars">\n{lines}</div></figure>' if most else ""


def histogram(title: str, values: Numbers, edge: int | None = None) -> str:
    """Returns bins of numbers as bars. Those above `edge` are in the colour of warnings."""
    found = bins(values, edge)
    ends = ("" if high == low else " and more" if high is None else f" to {high:,}" for low, high, _ in found)
    rows = ((f"{low:,}{end}", count) for (low, _, count), end in zip(found, ends, strict=True))
    return bars(title, rows, len(values), sum(edge is not None and low > edge for low, _, _ in found))


def bins(values: Numbers, edge: int | None = None) -> list[tuple[int, int | None, int]]:
    """Returns (first value, last value, count) of at most 16 bins of whole numbers, of equal round width.

    The last bin has the largest 1% if they are far; its last value is None. `edge`: the last value of a bin, if it is
    in the range of the bins.
    """
    low, top = int(values.min()), int(np.quantile(values, 0.99, method="higher"))
    least = max(1, (top - low + 1) / 14)
    scale = 10 ** int(math.log10(least))
    step = next(number * scale for number in (1, 2, 5, 10) if number * scale >= least)
    start = low // step * step if edge is None else low - (low - edge - 1) % step
    last = (top - start) // step + 1  # number of the bin without an end
    counts = np.bincount(np.minimum((values - start) // step, last)).tolist()
    lows = [start + step * place for place in range(len(counts))]
    return [(max(0, n), None if i == last else n + step - 1, counts[i]) for i, n in enumerate(lows)]
