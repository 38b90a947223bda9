"""The table of runs, read from their files and from SLURM if it responds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from helpers.sweeps import idle_process, make_sweep, set_launcher, states, write_lock

from clipx_launch.commands.runs import runs_in
from clipx_launch.point import Result


def run_with(folder: Path, age: float, *events: dict[str, object], now: float | None = None) -> None:
    row = {"step": 3, "samples": 30, "epoch": 0.1, "seconds": (now or time.time()) - age, "train/loss": 1.0}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").touch()
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "cut')


START = {"time": 0, "event": "start"}
SAVED = {"time": 0, "event": "stopped", "step": 3}


@pytest.mark.parametrize(
    ("age", "events", "state"),
    [
        (5, [START], "running"),
        (5000, [START], "silent"),
        (5000, [START, {"time": 0, "event": "end"}], "finished"),
        (5000, [START, {**SAVED, "signal": "SIGTERM"}, {"time": 0, "event": "checkpoint_saved"}], "cancelled"),
        (5000, [START, {**SAVED, "signal": "SIGUSR1"}], "stopped"),
        (5, [START, {**SAVED, "signal": "SIGTERM"}, START], "running"),
    ],
)
def test_the_state_of_a_run_without_a_sweep_follows_from_its_events(
    tmp_path: Path, age: float, events: list[dict[str, object]], state: str
) -> None:
    run_with(tmp_path, age, *events)
    (run,) = runs_in([tmp_path])
    assert run.state == state


def test_states_of_local_points_follow_their_files_and_processes(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, *([f"seed={seed}"] for seed in range(5)))
    points = [planned.point for planned in sweep.planned]
    run_with(points[0].folder, 5, START)
    (points[1].logs / "local.0.log").touch()
    points[3].write_result(Result("failed", 1, error="\nRuntimeError: a bug\nof two lines"))
    points[4].write_result(Result("stopped", 75, error="SIGTERM: stopped after step 3"))
    with idle_process() as (launcher, holder), idle_process() as (child, worker):
        set_launcher(tmp_path, holder)
        write_lock(points[0].folder, worker)
        found = states(tmp_path)
        assert found == {
            "0": ("running", ""),
            "1": ("starting", ""),
            "2": ("waiting", f"in the queue of {holder}"),
            "3": ("failed", "RuntimeError: a bug"),
            "4": ("cancelled", "SIGTERM: stopped after step 3"),
        }
        launcher.kill()
        launcher.wait()
        assert [states(tmp_path)[name][0] for name in "012"] == ["running", "lost", "lost"]
        child.kill()
        child.wait()
        assert states(tmp_path)["0"][0] == "lost"
