"""FastCLIP's study: its contenders compose, and its command runs a small case."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.examples import load
from helpers.runs import compose, run

from clipx.config.registry import CONF_DIR

SCRIPT = ROOT / "examples/fastclip_study.py"
study = load("fastclip_study.py")

TUNED = {**study.CONTENDERS, **study.SUCCESSORS}


def test_the_contenders_are_those_of_the_folder_with_tuned_values() -> None:
    assert {path.stem for path in (CONF_DIR / "experiment/fastclip_small").glob("*.yaml")} == set(TUNED)
    for name in TUNED:
        spec = compose("experiment=fastclip_small", f"{study.CONTENDER}={name}", "data.batch_size=64")
        assert spec.objective.kind == ("infonce" if name == "infonce_constant" else name)
        assert 1e-4 < spec.optimizer.lr < 1e-2


@pytest.mark.slow
def test_a_small_study_continues_and_reports(tmp_path: Path) -> None:
    swept = [f"{study.CONTENDER}=infonce_constant,fastclip_v1", "data.batch_size=64", "data.mismatched=0.2", "seed=0,1"]
    small = ("--samples", "256", "--gallery", "32", "--trunk", "60st", "--processes", "2")
    words = (sys.executable, str(SCRIPT), str(tmp_path), *small, "--overrides", *swept)
    failed = run(*words, "duration=0ep", check=False)
    assert (
        failed.returncode == 1 and failed.stderr.count("\n") == 1 and f"see {tmp_path}/logs/core.log" in failed.stderr
    )
    first = run(*words, "duration=2ep")
    found = json.loads((tmp_path / "results.json").read_text())
    cells = found["parts"]["core"]["cells"]
    assert {one["overrides"][study.CONTENDER] for one in cells} == {"infonce_constant", "fastclip_v1"}
    assert all(len(one["values"]) == 2 and 0 <= one["mean"] <= 1 for one in cells)
    assert found["hypotheses"][0]["verdict"] == "not measured", "registered for a batch of 16"
    assert (tmp_path / "core.html").is_file() and "fastclip_v1" in first.stdout
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/**/*.jsonl")}
    again = run(*words, "duration=2ep")
    assert [line.split()[1] for line in again.stdout.splitlines()[:2]] == ["core", "report-core"]
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished runs are not repeated"
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["core"]["cells"] == cells
