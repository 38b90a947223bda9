"""Whose a run directory is, and the small files in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import small

from clipx.data.source import Bad
from clipx.errors import CheckpointError, DataError
from clipx.rundir import RunDir, flatten
from clipx.trainer import Trainer


def started(path: Path) -> RunDir:
    """A directory whose run has logged a line."""
    rundir = RunDir(path)
    assert rundir.claim(small(path)) == []
    rundir.metrics.write_text('{"step": 1}\n')
    return rundir


def test_a_new_directory_is_claimed_with_its_configuration(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "deep" / "run")
    assert rundir.claim(small(rundir.path)) == []
    assert "batch_size: 32" in rundir.config.read_text()


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    rundir = started(tmp_path)
    with pytest.raises(CheckpointError, match="already holds a run"):
        rundir.claim(small(tmp_path))


def test_a_run_that_failed_before_its_first_line_may_be_started_anew(tmp_path: Path) -> None:
    """A mistake that is mended and typed again under the same name."""
    path = tmp_path / "run"
    (tmp_path / "names.txt").write_text("only\n")
    with pytest.raises(DataError, match="is out of step with .*names.txt: 1 names allow labels 0 to 0"):
        Trainer(small(path, "evaluator=[zeroshot]", f"evaluator.zeroshot.classnames={tmp_path}/names.txt"))
    RunDir(path).claim(small(path))
    assert RunDir(path).claim(small(path, "seed=7")) == []


def test_going_on_with_what_trains_the_same_is_told(tmp_path: Path) -> None:
    rundir = started(tmp_path)
    changed = rundir.claim(small(tmp_path, "resume=auto", "data.workers=1", "optimizer.lr=0.1"))
    assert changed == ["data.workers: 0 -> 1", "optimizer.lr: 0.001 -> 0.1"]


def test_going_on_as_another_run_is_refused(tmp_path: Path) -> None:
    rundir = started(tmp_path)
    before = rundir.config.read_text()
    with pytest.raises(CheckpointError, match=r"belongs to another run \(seed: 0 -> 7\)"):
        rundir.claim(small(tmp_path, "resume=auto", "seed=7"))
    assert rundir.config.read_text() == before


def test_a_bad_sample_is_named_once(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for _ in range(2):
        rundir.quarantine([Bad("a.tar:1.jpg", "image is empty"), Bad("ä.png", "caption is empty")])
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert lines == [
        {"sample": "a.tar:1.jpg", "reason": "image is empty"},
        {"sample": "ä.png", "reason": "caption is empty"},
    ]


def test_events_say_what_and_when(tmp_path: Path) -> None:
    RunDir(tmp_path).event("start", step=3)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["event"], event["step"]) == ("start", 3)
    assert event["time"] > 1.7e9


def test_flatten_names_each_leaf() -> None:
    assert dict(flatten({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}
