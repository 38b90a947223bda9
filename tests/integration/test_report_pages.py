"""Report pages in a browser: values under the pointer and by keys, ranges, labels, tables."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.browser import Browser
from helpers.samples import encode, picture

from clipx.report.chart import Chart, Charts, Series
from clipx.report.console import format_value
from clipx.report.page import Cell, page, table, with_minus
from clipx.report.predictions import Answer, Prediction, Predictions
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
    assert crosshairs(browser) == [samples] * 2, "the crosshair stands at the same point in all charts"

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


def crosshairs(browser: Browser) -> list[int]:
    """Returns the places of the crosshairs of all charts that have one."""
    return browser(
        "clipxCharts.groups.run.charts.flatMap(c => [...c.over.querySelectorAll('.cross')].map(e => Math.round(c.at(e.x1.baseVal.value))))"
    )


def test_keys_move_from_point_to_point_and_zoom(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path, RunRecord(name="run", rows=ROWS, final={}, config="", events=EVENTS))
    browser.open(tmp_path / "report.html")
    browser(f"document.querySelector('{PLOT}').focus()")
    for keys, place in (
        (["ArrowRight"], 100),
        (["ArrowRight"], 200),
        (["End"], 10000),
        (["ArrowLeft", "ArrowLeft"], 9800),
    ):
        for key in keys:
            browser.key(key)
        assert crosshairs(browser) == [place] * 2, key
        assert browser.texts(".tip:not([hidden])")[0].startswith(f"{place:,} samples · step {place // 100} ")
    browser.key("+")
    low, high = browser("clipxCharts.groups.run.zoom")
    assert (low, high) == (4900, 9900) and crosshairs(browser) == [9800] * 2
    for _ in range(2):
        browser.key("ArrowRight")
    assert browser("clipxCharts.groups.run.zoom") == [5000, 10000], "the range follows the crosshair"
    browser.key("Home")
    assert browser("clipxCharts.groups.run.zoom") == [100, 5100] and crosshairs(browser) == [100] * 2
    for _ in range(40):
        browser.key("+")
    assert browser("(([a, b]) => 0 < b - a && b - a < 1)(clipxCharts.groups.run.zoom)")
    browser.key("-")
    browser.key("Escape")
    assert browser("clipxCharts.groups.run.zoom") is None


def test_numbers_of_charts_and_tables_are_written_alike(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path, RunRecord(name="run", rows=ROWS, final={}, config=""))
    browser.open(tmp_path / "report.html")
    values = [0, 1, -1.5, 0.07, 0.9996, 999.96, 1047, 20736, 12345.6, 1e-3, 4.894e-7, -2e-5, 1e30]
    shown = [with_minus(format_value("train/loss", value)) for value in values]
    assert browser(f"{values}.map(clipxTools.number)") == shown
    shown = [format_value("eval/x/top1", value) for value in (0.11562, 1, 0.5)]
    assert browser("[0.11562, 1, 0.5].map(v => clipxTools.percent(v))") == shown


@pytest.mark.parametrize("width", [1300, 320])
def test_a_schedule_that_ends_at_0_and_large_values_have_readable_axes(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    """Labels of an axis do not overlap; the learning rate is drawn without its 0 on a logarithmic axis."""
    rows = [
        {**row, "train/lr": 1e-3 * (1 - row["step"] / 100), "train/grad_norm": 10.0 ** (row["step"] * 0.3)}
        for row in ROWS
    ]
    write_report(tmp_path, RunRecord(name="run", rows=rows, final={}, config=""))
    browser.open(tmp_path / "report.html", width)
    browser("[...document.querySelectorAll('.head button')].at(-1).click()")  # the gradient norm's
    found = browser(
        "clipxCharts.groups.run.charts.map(c => [...c.svg.querySelectorAll('text')].map(t => t.textContent))"
    )
    assert found[1][:3] == ["1e−5", "3e−5", "1e−4"] and found[2][:3] == ["10k", "100M", "1T"]
    assert all(labels[-1] == "samples seen" for labels in found)
    assert overlaps(browser) == []
    path = browser("clipxCharts.groups.run.charts[1].svg.querySelector('.line').getAttribute('d')")
    assert path.count("L") == 98 and "NaN" not in path


def overlaps(browser: Browser) -> list[str]:
    """Returns the labels of charts that overlap another one, or that are cut off by the edge of the window."""
    return browser("""(() => {
        const found = [];
        for (const svg of document.querySelectorAll('svg.plot')) {
            const boxes = [...svg.querySelectorAll('text')].filter(t => t.textContent).map(t => [t.textContent, t.getBoundingClientRect()]);
            for (const [i, [name, a]] of boxes.entries()) {
                if (a.left < 0 || a.right > innerWidth) found.push(`${name} is cut off`);
                for (const [other, b] of boxes.slice(i + 1))
                    if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom) found.push(`${name} and ${other}`);
            }
        }
        return found;
    })()""")


@pytest.mark.parametrize("width", [1300, 320])
def test_points_have_error_bars_over_named_places(browser: Browser, tmp_path: Path, width: int) -> None:
    values = (1e-4, 2e-4, 1e-3, 1e-2)
    group = Charts("lr", x_name="optimizer.lr", x_log=True, x_ticks=[(v, f"{v:g} (a long label)") for v in values])
    series = [Series(f"s{k}", values, [k, k + 1, k + 2, k + 3], half=[0.5] * 4, style=k, points=True) for k in range(3)]
    (tmp_path / "page.html").write_text(
        page(
            "t", group.figure(Chart("metric", series)) + group.script(), ("chart_tools.js", "chart.js"), ("chart.css",)
        )
    )
    browser.open(tmp_path / "page.html", width)
    assert overlaps(browser) == []
    assert {f"{v:g} (a long label)" for v in values} < set(browser.texts("text.tick"))
    places = browser("[...document.querySelectorAll('.series circle')].map(c => Math.round(c.cx.baseVal.value))")
    assert len(set(places)) == 12, "markers of one place cover each other"
    assert browser("document.querySelectorAll('.series path.line').length") == 12
    browser(f"document.querySelector('{PLOT}').focus()")
    browser.key("ArrowRight")
    assert browser.texts(".tip") == ["optimizer.lr 0.0001 (a long label)s00 ± 0.5s11 ± 0.5s22 ± 0.5"]
    browser.key("+")
    assert browser("document.querySelector('button.reset').hidden") is False
    browser("document.querySelector('button.reset').click()")
    assert browser("clipxCharts.groups.lr.zoom") is None, "a group without controls shows all again"


@pytest.mark.parametrize("width", [2200, 1300, 400, 320])
def test_no_page_is_wider_than_the_window(browser: Browser, tmp_path: Path, width: int) -> None:
    name = "eval/a_long_name_of_an_evaluator/of_a_subset/image_to_text/recall@1"
    final = {name: 0.5, f"{name}0": 0.7}
    record = RunRecord(
        name="x" * 120, rows=[*ROWS, {**ROWS[-1], **final}], final=final, config="", facts={"a": "b" * 300}
    )
    write_report(tmp_path, record)
    browser.open(tmp_path / "report.html", width)
    assert browser("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [2200, 1300, 320])
def test_predictions_are_beside_their_images(browser: Browser, tmp_path: Path, width: int) -> None:
    """An image of any size has 96 x 96 pixels on the page; words without a break do not widen it."""
    encoded = base64.b64encode(encode(picture(60, 96), "JPEG")).decode()
    texts = ["<img src=x onerror='window.hit=1'>" * 3, "x" * 200, "a caption of usual length with ten words in it"]
    answers = [Answer(text, rank, 0.5, rank == 14) for text, rank in zip([*texts, "right"], (1, 2, 3, 14), strict=True)]
    found = Predictions("captions", 99, [Prediction(encoded, answers)] * 12)
    (tmp_path / "predictions-captions.json").write_text(json.dumps(asdict(found)))
    write_report(tmp_path, RunRecord(name="run", rows=ROWS, final={}, config=""))
    browser.open(tmp_path / "report.html", width)
    assert browser("document.documentElement.scrollWidth") <= width
    sizes = browser("[...document.querySelectorAll('.predictions img')].map(i => [i.width, i.height, i.naturalWidth])")
    assert sizes == [[96, 96, 60]] * 12
    boxes = "[...document.querySelectorAll('.predictions figure')].map(e => e.getBoundingClientRect())"
    columns = browser(f"new Set({boxes}.map(box => box.x)).size")
    assert columns == 1 if width == 320 else columns >= 3
    assert browser(f"{boxes}.every(box => box.left >= 0 && box.right <= {width})")
    assert browser.texts(".predictions .miss li")[:4] == [f"{text} 0.50" for text in texts] + ["right 0.50 ✓"]
    assert browser("window.hit === undefined && !document.querySelector('img[src=x]')")


def test_headers_sort_by_number_with_missing_values_last(browser: Browser, tmp_path: Path) -> None:
    rows = [["a", Cell("9 %", 9)], ["b", Cell("–")], ["c", Cell("10 %", 10)], ["d", Cell("1e-3 %", 1e-3)]]
    (tmp_path / "page.html").write_text(page("t", table(["name", "value"], rows, numbers=1)))
    browser.open(tmp_path / "page.html")
    for sort, order in (("descending", "cadb"), ("ascending", "dacb")):
        browser("document.querySelectorAll('th button')[1].click()")
        assert "".join(browser.texts("td:first-child")) == order
        assert browser("document.querySelectorAll('th')[1].ariaSort") == sort


def test_a_hostile_name_runs_no_script(browser: Browser, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    rows = [{**row, f"eval/{hostile}/top1": 0.5} for row in ROWS]
    events = [*EVENTS, {"time": 1e9 + 60, "event": "x", "step": 60, "message": hostile}]
    write_report(tmp_path, RunRecord(name=hostile, rows=rows, final={}, config=hostile, events=events))
    browser.open(tmp_path / "report.html")
    browser.mouse("Moved", browser.place("figure.chart:nth-of-type(2) svg.plot", 0.6, 0.4))
    assert any(hostile in tip for tip in browser.texts(".tip:not([hidden])"))
    assert browser("window.hit === undefined && !document.querySelector('img[src=x]')")
