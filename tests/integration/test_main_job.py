"""The main job, run as in the README, reaches the numbers of docs/benchmarks/README.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.runs import run

TRAIN = (sys.executable, "-m", "clipx.train")


def final(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


def train(run_dir: Path, *overrides: str) -> dict[str, float]:
    """Trains on one thread: with two threads next to other tests a run takes many times as long."""
    run(*TRAIN, f"run_dir={run_dir}", *overrides, timeout=2400, fresh=True)
    return final(run_dir)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_default_run_reaches_the_documented_accuracy_on_held_out_combinations(tmp_path: Path) -> None:
    found = train(tmp_path / "run")
    assert found["eval/zeroshot/held_out/top1"] >= 0.90
    assert found["eval/zeroshot/held_out/chance"] == pytest.approx(1 / 24)
    assert found["eval/zeroshot/top1"] > 10 * found["eval/zeroshot/chance"]
    for direction in ("image_to_text", "text_to_image"):
        assert found[f"eval/retrieval/{direction}/recall@5"] > 0.9
    assert (tmp_path / "run" / "report.png").stat().st_size > 10_000
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.number
@pytest.mark.timeout(2400)
def test_digits_reach_the_documented_accuracy(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "data=digits")["eval/zeroshot/top1"] >= 0.97
