"""Data of interactive charts: reduction of long series, common places, bands."""

from __future__ import annotations

import numpy as np

from clipx.report.chart import spikes


def test_each_part_keeps_its_extremes() -> None:
    values = np.sin(np.arange(1000))
    chosen = set(spikes(values, 102).tolist())
    for start in range(0, 1000, 20):
        part = values[start : start + 20]
        assert {start + int(part.argmin()), start + int(part.argmax())} <= chosen
