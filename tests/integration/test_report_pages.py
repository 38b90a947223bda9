"""The report page of a run in a browser: values under the pointer, ranges, labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.browser import Browser

from clipx.report.run_report import RunRecord, write_report

pytestmark = pytest.mark.slow

ROWS = [
    {"step": s, "samples": 100.0 * s, "epoch": s / 10, "seconds": 1e9 + s, "train/loss": 5.0 - s / 50, "train/lr": 1e-3}
    for s in range(1, 101)
]
EVENTS = [
    {"time": 1e9, "event": "start", "step": 0, "command": "python -m clipx.train"},
    {"time": 1e9 + 50.5, "event": "start", "step": 50},
]
PLOT = "figure.chart svg.plot"
TICKS = f"{PLOT} > text.tick"


def test_curves_of_a_run(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path, RunRecord(name="run", rows=ROWS, final={}, config="", events=EVENTS))
    browser.open(tmp_path / "report.html")
    browser.mouse("Moved", browser.place(PLOT, 0.52, 0.4))
    (tip,) = browser.texts(".tip:not([hidden])")
    samples = int(tip.partition(" samples")[0].replace(",", ""))
    assert abs(samples - 5000) < 500, "the pointer is near the middle"
    assert f"step {samples // 100} · epoch {samples / 1000:.2f}" in tip
    assert f"loss{5 - samples / 5000:g}" in tip or f"loss{5 - samples / 5000:.3g}" in tip, tip
    crosshairs = "c => [...c.over.querySelectorAll('.cross')].map(e => Math.round(c.at(e.x1.baseVal.value)))"
    found = browser(f"clipxCharts.groups.run.charts.flatMap({crosshairs})")
    assert found == [samples] * 2, "the crosshair stands at the same point in all charts"

    before = browser.texts(TICKS)
    browser.drag(browser.place(PLOT, 0.4, 0.5), browser.place(PLOT, 0.6, 0.5))
    low, high = browser("clipxCharts.groups.run.zoom")
    assert 3000 < low < 4500 < 5500 < high < 7000
    assert browser.texts(TICKS) != before
    assert browser("[...document.querySelectorAll('button.reset')].every(b => !b.hidden)")
    for clicks in (1, 2):
        at = browser.place(PLOT, 0.5, 0.5)
        browser.mouse("Pressed", at, clicks)
        browser.mouse("Released", at, clicks)
    assert browser("clipxCharts.groups.run.zoom") is None
    assert browser.texts(TICKS) == before
    assert browser.texts(".mark title")[0].startswith("resumed at step 50")

    browser("document.querySelector('.controls select').value = 'step'")
    browser("document.querySelector('.controls select').onchange()")
    assert browser.texts(TICKS)[-2:] == ["100", "steps"]


def test_a_hostile_name_runs_no_script(browser: Browser, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    rows = [{**row, f"eval/{hostile}/top1": 0.5} for row in ROWS]
    events = [*EVENTS, {"time": 1e9 + 60, "event": "x", "step": 60, "message": hostile}]
    write_report(tmp_path, RunRecord(name=hostile, rows=rows, final={}, config=hostile, events=events))
    browser.open(tmp_path / "report.html")
    browser.mouse("Moved", browser.place("figure.chart:nth-of-type(2) svg.plot", 0.6, 0.4))
    assert any(hostile in tip for tip in browser.texts(".tip:not([hidden])"))
    assert browser("window.hit === undefined && !document.querySelector('img[src=x]')")
