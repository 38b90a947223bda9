"""The table of runs is read from their files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support import small

from clipx.trainer import Trainer
from launch.status import main, read_status


def test_a_finished_run_is_shown_with_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "runs" / "one"
    Trainer(small(run_dir, "checkpoint=none", "evaluator=[retrieval]")).fit()
    capsys.readouterr()
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "finished" in shown
    assert "retrieval/text_to_image/recall@1" in shown
    loss = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[3])["train/loss"]
    assert f"{loss:.4f}" in shown


@pytest.mark.parametrize(
    ("age", "event", "state"), [(5, "start", "running"), (5000, "start", "silent"), (5000, "end", "finished")]
)
def test_a_state_follows_from_the_last_line(tmp_path: Path, age: float, event: str, state: str) -> None:
    now = time.time()
    row = {"step": 3, "samples": 30, "epoch": 0.1, "seconds": now - age, "train/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": event}) + "\n")
    assert read_status(tmp_path, now).state == state


def test_no_run_at_all_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
