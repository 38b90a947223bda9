"""The picture and the HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.html_page import Page
from matplotlib.text import Text

from clipx.report.chart import spikes
from clipx.report.figure import new_figure, to_png
from clipx.report.run_report import RunRecord, write_report

ROWS = [
    {"step": s, "samples": s, "epoch": s, "seconds": s, "train/loss": 5 / s, "train/lr": 1e-3, "train/temperature": 0.07,
     "train/grad_norm": 1.0, "train/samples_per_second": 100.0}
    for s in range(1, 30)
] + [{"step": 29, "samples": 29, "epoch": 29, "seconds": 29, "eval/zeroshot/top1": 0.9, "eval/zeroshot/chance": 0.1}]  # fmt: skip


def test_a_name_in_a_figure_is_no_formula() -> None:
    figure = new_figure("a $x$", 3, 2)
    to_png(figure)
    assert not [text for text in figure.findobj(Text) if text.get_parse_math()]


def test_each_part_keeps_its_extremes() -> None:
    values = np.sin(np.arange(1000))
    chosen = set(spikes(values, 102).tolist())
    for start in range(0, 1000, 20):
        part = values[start : start + 20]
        assert {start + int(part.argmin()), start + int(part.argmax())} <= chosen


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the page need no picture, which takes 0.4 s."""
    monkeypatch.setattr("clipx.report.run_report.draw", lambda name, charts: b"")


def record(**changes: Any) -> RunRecord:
    values = {"name": "run", "rows": ROWS, "final": {"train/loss": 0.2}, "config": "name: run\n"}
    return RunRecord(**{**values, **changes})


def written(tmp_path: Path, of: RunRecord) -> tuple[str, Page]:
    write_report(tmp_path, of)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def charts(page: Page) -> dict[str, Any]:
    """Returns the charts of a page by title, with the places of their series."""
    data = page.data["charts-run"]
    for chart in data["charts"]:
        for series in chart["series"]:
            series["x"] = data["places"][series["x"]]
    return {chart["title"]: chart for chart in data["charts"]}


def test_rows_of_evaluations_and_a_shorter_last_interval_are_no_points_of_training(tmp_path: Path) -> None:
    """81 steps, logged every second one: an evaluation after step 8 repeats its row with the next learning rate."""
    rows = [
        {"step": s, "samples": 4.0 * s, "epoch": s, "seconds": s, "train/loss": 1 / s, "train/lr": 1 / s,
         "train/samples_per_second": 100.0 + s, "train/step_s": 0.5 + s}
        for s in (*range(2, 82, 2), 81)
    ]  # fmt: skip
    repeated = {"train/lr": 0.07, "train/evaluation_s": 3.0, "eval/zeroshot/top1": 0.5}
    rows.insert(4, {"step": 8, "samples": 32.0, "epoch": 8, "seconds": 8, **repeated})
    rows.append({**rows[4], "step": 81, "samples": 324.0, "train/evaluation_s": 4.0})
    found = charts(written(tmp_path, record(rows=rows))[1])
    steps = {title: [x / 4 for x in chart["series"][0]["x"]] for title, chart in found.items()}
    assert steps["Learning rate"] == steps["Loss"] == [*range(2, 82, 2), 81]
    assert 0.07 not in found["Learning rate"]["series"][0]["y"]
    assert steps["Samples per second"] == steps["train/step_s"] == [*range(2, 82, 2)]
    assert steps["train/evaluation_s"] == steps["Held out: top-1 accuracy and recall@1"] == [8, 81]


def test_a_resumed_run_shows_its_starts_commands_and_time(tmp_path: Path) -> None:
    """The run trains for 10 s, is stopped, resumes 1000 s later with another command, and trains for 19 s."""
    rows = [{**row, "seconds": row["step"] + (1000 if row["step"] > 10 else 0)} for row in ROWS[:29]]
    versions = {"clipx": "0.1.0+1f", "torch": "2.15.0"}
    events = [
        {"time": 0.0, "event": "start", "step": 0, "world": 1, "command": "python -m clipx.train data=digits", **versions},
        {"time": 10.0, "event": "stopped", "step": 10, "signal": "SIGTERM"},
        {"time": 1010.0, "event": "start", "step": 10, "world": 2, "command": "python -m clipx.train resume=auto", **versions},
        {"time": 1015.0, "event": "non_finite", "step": 15, "message": "a step is nan"},
        {"time": 1016.0, "event": "checkpoint_left", "step": 16, "message": "step-00000020 is renamed"},
        {"event": "no time"}, {"time": "x", "event": "start"}, {"time": 5.0, "event": "start", "step": "a"},
    ]  # fmt: skip
    text, page = written(tmp_path, record(rows=rows, events=events, facts={"device": "cpu"}))
    data = page.data["charts-run"]
    assert [(at, words.split(",")[0]) for at, words in data["marks"]] == [
        (10, "stopped by SIGTERM at step 10"), (10, "resumed at step 10"), (15, "non_finite: a step is nan"),
        (16, "checkpoint_left: step-00000020 is renamed"),
    ]  # fmt: skip
    warnings = text.partition(">Warnings<")[2].partition(">Notes<")[0]
    assert "a step is nan" in warnings and "step-00000020" not in warnings, "a fact is no warning"
    assert data["axes"]["seconds"] == list(range(30)), "the time between the starts counts"
    assert data["axes"]["step"] == data["axes"]["samples"] == list(range(30))
    for shown in ("python -m clipx.train data=digits", "python -m clipx.train resume=auto", "resumed1 time", "00:29",
                  "stopped by SIGTERM at step 10", "clipx 0.1.0+1f, torch 2.15.0", "devicecpu"):  # fmt: skip
        assert shown in page.text.replace("\n", ""), shown
    commands = [text.index(f"python -m clipx.train {words}") for words in ("resume=auto", "data=digits")]
    assert commands == sorted(commands), "the command of the last start is the first"
    assert 'class="state"' not in text, "the run has finished"
    assert "http" not in text, "the page needs no other file"


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        ({"event": "failed", "message": "<b>lr</b> is too high"}, "Failed after step 5: <b>lr</b> is too high"),
        ({"event": "stopped", "signal": "SIGTERM"}, "Stopped by SIGTERM at step 5"),
    ],
)
def test_a_run_that_ended_early_says_so_at_the_head(tmp_path: Path, event: dict[str, Any], shown: str) -> None:
    begun = {"time": 0.0, "event": "start", "step": 0}
    text, page = written(tmp_path, record(events=[begun, {"time": 9.0, "step": 5, **event}]))
    assert '</h1>\n<p class="state">' in text and shown in page.text
    text, _ = written(tmp_path, record(events=[begun, {"time": 9.0, "step": 5, **event}, {**begun, "time": 10.0}]))
    assert 'class="state"' not in text, "it has been resumed"
