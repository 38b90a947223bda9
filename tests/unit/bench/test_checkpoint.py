"""The checkpoint benchmark through its command, at a size too small to measure time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.runs import run

from clipx.bench.checkpoint import CheckpointBenchSpec
from clipx.bench.processes import Processes
from clipx.bench.saving import SaveTiming

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


def test_the_first_save_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalls = {"clipx": [9.0, 1.0, 3.0, 2.0], "copy": [8.0, 2.0, 2.0, 2.0]}
    stalls |= {"torch_save": [7.0, 4.0, 4.0, 8.0], "dcp_async": [6.0, 1.0, 6.0, 4.0]}
    timings = {name: [SaveTiming(stall, 2 * stall, 1.0) for stall in found] for name, found in stalls.items()}
    monkeypatch.setattr(Processes, "run", lambda *_: timings)
    found = CheckpointBenchSpec(device="cpu", run_dir=str(tmp_path), repeats=3).run(lambda text: None).figures
    assert found["stall_seconds"] == {"clipx": 2.0, "copy": 2.0, "torch_save": 4.0, "dcp_async": 4.0}
    assert found["first_stall_seconds"] == {"clipx": 9.0, "copy": 8.0, "torch_save": 7.0, "dcp_async": 6.0}
    assert [found[f"stall_ratio{end}"] for end in ("", "_copy", "_dcp_async")] == [0.25, 1.0, 0.5]
