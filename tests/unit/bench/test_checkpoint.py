"""The checkpoint benchmark through its command, at a size too small to measure time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.runs import run

ONE = ("device=cpu", "threads=1")
BENCH = (sys.executable, "-m", "clipx.bench", "checkpoint")


@pytest.mark.slow
def test_all_writers_save_the_same_state_and_the_last_line_is_json(tmp_path: Path) -> None:
    done = run(*BENCH, "parameters=3000000", "repeats=1", *ONE, f"run_dir={tmp_path}/found")
    assert "Warning" not in done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    names = {"clipx", "copy", "torch_save", "dcp_async"}
    for key in ("stall_seconds", "first_stall_seconds", "total_seconds", "slowdown"):
        assert figures[key].keys() == names and min(figures[key].values()) > 0
    stalls = figures["stall_seconds"]
    assert abs(figures["stall_ratio"] / (stalls["clipx"] / stalls["torch_save"]) - 1) < 0.01
    assert abs(figures["stall_ratio_copy"] / (stalls["clipx"] / stalls["copy"]) - 1) < 0.01
    assert figures["total_seconds"]["clipx"] > stalls["clipx"]
    assert figures["bytes"] == 36_000_000
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    assert results["figures"] == figures and len(results["details"]["laps"]["clipx"]) == 2
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["results.json"]


def test_invalid_options_print_a_one_line_error() -> None:
    done = run(*BENCH, "parameters=0", check=False)
    assert (done.returncode, done.stderr) == (2, "error: parameters=0 must be at least 1\n")
