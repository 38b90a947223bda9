"""Data of interactive charts: reduction of long series, common places, bands."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.html_page import Page

from clipx.report.chart import Chart, Charts, Series, spikes


def test_each_part_keeps_its_extremes() -> None:
    values = np.sin(np.arange(1000))
    chosen = set(spikes(values, 102).tolist())
    for start in range(0, 1000, 20):
        part = values[start : start + 20]
        assert {start + int(part.argmin()), start + int(part.argmax())} <= chosen


def test_equal_places_are_stored_once_and_bands_with_their_points() -> None:
    group = Charts("run", most=1200)
    x, y = list(range(100)), [k / 7 for k in range(100)]
    chart = Chart(
        "t", [Series("a", x, y), Series("b", x, y, half=y, style=1, run="r0"), Series("c", x[:3], [1, None, 2])]
    )  # type: ignore[list-item]
    html = group.figure(chart) + group.controls()
    data = Page(html + group.script()).data["charts-run"]
    (found,) = data["charts"]
    assert [s["x"] for s in found["series"]] == [0, 0, 1] and data["places"] == [x, [0, 2]]
    a, b, c = found["series"]
    assert b["half"] == b["y"] == a["y"] == pytest.approx(y, rel=1e-4)
    assert (b["run"], c["bad"]) == ("r0", [1])
