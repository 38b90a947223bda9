"""Final metrics of a run, read from the files that training and evaluations wrote."""

from __future__ import annotations

import json
from pathlib import Path

from clipx.evaluator.recorded import recorded_metrics

COUNTERS = {"samples": 64, "epoch": 0.5, "seconds": 1.0}


def write_metrics(run_dir: Path, *rows: dict[str, float]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({**COUNTERS, **row}) + "\n" for row in rows))


def test_only_the_last_step_counts_and_training_takes_precedence(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 2, "eval/z/top1": 0.1}, {"step": 4, "eval/z/top1": 0.2, "train/loss": 3.0})
    for step, value in ((2, 0.7), (4, 0.8)):
        text = json.dumps({"model": "m", "step": step, "data": "shapes", "eval/z/top1": value, "eval/z/top5": value})
        (tmp_path / f"evaluation-shapes-step-{step}.json").write_text(text)
    found = {name: one.value for name, one in recorded_metrics(tmp_path, 4, "shapes").items()}
    assert found == {"eval/z/top1": 0.2, "eval/z/top5": 0.8, "eval/z/shapes/top1": 0.8, "eval/z/shapes/top5": 0.8}


def test_sets_alone_and_evaluations_of_several_steps_are_read(tmp_path: Path) -> None:
    values = {step: {"eval/z/imagenet/top1": step / 10, f"eval/z/only_{step}/top1": 1.0} for step in (2, 4)}
    models = [{"model": "m", "step": step, **values[step]} for step in values]
    (tmp_path / "evaluation-sets.json").write_text(json.dumps({"data": "sets", "models": models}))
    found = recorded_metrics(tmp_path, 4, "shapes")
    assert {name: one.value for name, one in found.items()} == values[4]
