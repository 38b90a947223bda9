"""The table of runs, read from their files and from SLURM if it responds."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from helpers.sweeps import idle_process, make_sweep, refused, set_launcher, states, write_lock

from clipx.run.lock import Holder
from clipx.storage import safe_json
from clipx_launch import files
from clipx_launch.__main__ import main
from clipx_launch.cluster import Job
from clipx_launch.commands.run import State
from clipx_launch.commands.runs import runs_in, sweep_runs
from clipx_launch.commands.state import state_of
from clipx_launch.options import LocalSpec
from clipx_launch.point import Result
from clipx_launch.slurm_spec import SlurmSpec
from clipx_launch.sweep import Sweep


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


def test_a_stopped_run_is_not_called_cancelled_while_its_job_is(tmp_path: Path) -> None:
    """Its script asks SLURM what has ended the run, and then requeues it."""
    (planned,) = make_sweep(tmp_path, ["seed=0"]).planned
    point = planned.point
    point.record_job("7", None)
    point.write_result(Result("stopped", 75, error="SIGTERM: stopped after step 3, saved"))
    (run,) = runs_in([tmp_path])
    for state, expected in (("RUNNING", State.starting), ("COMPLETING", State.starting), ("PENDING", State.requeued)):
        assert state_of(run, {"7": Job(state)}, time.time())[0] is expected, state
    (point.files / "cancel").touch()
    for jobs in ({"7": Job("COMPLETING")}, {"7": Job("CANCELLED")}, {}):
        assert state_of(run, jobs, time.time()) == (State.cancelled, "SIGTERM: stopped after step 3, saved")


def test_a_job_submitted_by_hand_is_known_before_it_locks_the_run(tmp_path: Path) -> None:
    """Its script has failed in its setup."""
    (planned,) = make_sweep(tmp_path, ["seed=0"], spec=SlurmSpec()).planned
    assert states(tmp_path)["0"] == ("waiting", "its script has not been submitted")
    files = planned.point.launch_dir / "7_3"
    files.mkdir()
    (files / "result.json").write_text('{"state": "failed", "exit_code": 1, "error": "no module cuda"}')
    (run,) = runs_in([tmp_path / "0"])
    assert (run.job, run.state, run.reason) == ("7_3", State.failed, "no module cuda")


def test_a_job_that_ran_out_of_memory_is_named(tmp_path: Path) -> None:
    (planned,) = make_sweep(tmp_path, ["seed=0"]).planned
    planned.point.record_job("7", None)
    (run,) = runs_in([tmp_path])
    reason = "job 7 is out of memory: raise hydra.launcher.mem_gb, or lower data.workers"
    assert state_of(run, {"7": Job("OUT_OF_MEMORY")}, time.time()) == (State.failed, reason)


def test_a_point_in_use_by_another_process_is_running(tmp_path: Path) -> None:
    (planned,) = make_sweep(tmp_path, ["seed=0"]).planned
    planned.point.write_result(Result("failed", 3, error="in use by pid 5"))
    assert states(tmp_path)["0"] == ("failed", "in use by pid 5")
    with idle_process() as (_, holder):
        write_lock(planned.point.folder, holder)
        assert states(tmp_path)["0"] == ("starting", "in use by pid 5")


def test_runs_are_listed_by_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides that differ are those of the points of the same sweep."""
    for name, key in (("b", "seed"), ("a", "data.workers")):
        make_sweep(tmp_path / name, [f"{key}=0"], [f"{key}=1"])
    run_with(tmp_path / "alone", 5000, START)
    found = runs_in([tmp_path])
    assert [run.name for run in found] == ["a/0", "a/1", "b/0", "b/1", "alone"]
    assert [run.varied for run in found[:4]] == [
        {"data.workers": "0"}, {"data.workers": "1"}, {"seed": "0"}, {"seed": "1"},
    ]  # fmt: skip
    assert main(["status", str(tmp_path)]) == 0
    rules = [line for line in capsys.readouterr().out.splitlines() if line.startswith("├")]
    assert len(rules) == 2


def test_live_adds_columns_of_the_newest_values_of_running_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs: one on a GPU, whose last row has none of the metrics, one on the CPU, and one that has ended."""
    waits = {"train/data_wait_share": 0.031}
    device = {"train/mfu": 0.4213, "train/device_utilization": 0.98, "train/device_memory_gb": 71.26}
    for name, values in (("0", device | waits), ("1", waits), ("2", device | waits)):
        run_with(tmp_path / name, 5, START, *([{"time": 0, "event": "end"}] if name == "2" else []))
        path = tmp_path / name / "metrics.jsonl"
        last = json.loads(path.read_text())
        rows = (last | dict.fromkeys(values, 0.5), last | values, last)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["status", str(tmp_path), "--live"]) == 0
    lines = [re.split(r" *[┃│] *", line)[1:-1] for line in capsys.readouterr().out.splitlines() if line[0] in "┃│"]
    table = [{key: row[lines[0].index(key)] for key in ("MFU", "device", "data wait", "memory")} for row in lines[1:]]
    assert [list(row.values()) for row in table] == [["42.1%", "98%", "3%", "71.3 GB"], ["", "", "3%", ""], [""] * 4]
    assert main(["status", str(tmp_path)]) == 0
    assert "data wait" not in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    found = [run["live"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert found == [device | waits, waits, None]


def test_commands_take_the_directory_of_a_run_wherever_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A point inside the folder of its sweep, one outside, and a run that no launcher has started."""
    made = make_sweep(tmp_path / "sweep", ["seed=0"], ["seed=1"])
    outside = made.planned[1].point
    outside.folder = tmp_path / "elsewhere"
    made.pending = made.planned
    made.create_points(submitted=time.time())
    (tmp_path / "sweep/.launch/sweep.json").unlink()
    made.save(LocalSpec())
    for planned in made.planned:
        planned.point.write_result(Result("failed", 1, error="a bug"))
        (planned.point.logs / "local.0.log").write_text(f"log of {planned.point.index}\n")
    for point in (made.planned[0].point, outside):
        (run,) = sweep_runs(point.folder)
        assert (run.sweep, run.state, run.launch is not None) == (tmp_path / "sweep", State.failed, True)
        assert main(["logs", str(point.folder)]) == 0
        assert f"log of {point.index}\n" in capsys.readouterr().out
        assert main(["cancel", str(point.folder)]) == 0
        assert capsys.readouterr().out == "nothing to cancel: 1 failed\n"
    point_file = outside.launch_dir / "point.json"
    point_file.rename(tmp_path / "kept")
    (damaged,) = (run for run in sweep_runs(tmp_path / "sweep") if run.folder == outside.folder)
    assert (damaged.sweep, damaged.point, damaged.launch is not None) == (tmp_path / "sweep", None, True)
    (tmp_path / "kept").rename(point_file)
    (tmp_path / "sweep/.launch/sweep.json").unlink()
    assert {run.sweep for run in (*sweep_runs(outside.folder), *sweep_runs(tmp_path / "sweep/0"))} == {
        tmp_path / "sweep"
    }
    run_with(tmp_path / "alone", 5000, START)
    assert f"python -m clipx.train resume={tmp_path}/alone continues it" in refused_without(capsys, tmp_path / "alone")


def test_a_sweep_that_was_moved_or_copied_lists_its_own_points(tmp_path: Path) -> None:
    made = make_sweep(tmp_path / "a", ["seed=0"], ["seed=1"])
    for planned in made.planned:
        planned.point.write_result(Result("failed", 1, error="a bug"))
    shutil.copytree(tmp_path / "a", tmp_path / "copied")
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "moved/1").rename(tmp_path / "gone")
    for name, points in (("copied", "01"), ("moved", "0")):
        folder = tmp_path / name
        runs = sweep_runs(folder)
        assert [run.folder for run in runs] == [folder / number for number in points]
        for run in (*runs, *sweep_runs(folder / "0")):
            assert (run.sweep, run.launch is not None, run.state) == (folder, True, State.failed)


def test_a_point_keeps_the_settings_of_its_latest_launch(tmp_path: Path) -> None:
    make_sweep(tmp_path, ["seed=0"], ["seed=1"], spec=LocalSpec(parallelism=3))
    (again,) = runs_in([tmp_path / "0"])
    assert again.point is not None
    relaunched = Sweep.from_points(tmp_path, [again.point])
    relaunched.pending = relaunched.planned
    relaunched.save(LocalSpec(parallelism=5))
    Sweep(tmp_path, {0: []}, planned=relaunched.planned).save(LocalSpec(parallelism=7))  # launches nothing
    launches = [run.launch.settings["parallelism"] for run in sweep_runs(tmp_path) if run.launch]
    assert launches == [5, 3]


def test_a_sweep_file_of_another_user_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is for its owner alone; the points' own files are for all."""
    make_sweep(tmp_path / "sweep", ["seed=0"], ["seed=1"])

    def read(path: Path, *limit: int) -> bytes:
        if path.name == "sweep.json" and path.exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return safe_json.read_regular(path, *limit)

    monkeypatch.setattr(files, "read_regular", read)
    monkeypatch.setattr(files, "_NEW_S", 0.0)
    for folder, names in (("sweep", "01"), ("sweep/0", "0")):
        runs = sweep_runs(tmp_path / folder)
        assert [run.folder.name for run in runs] == list(names)
        assert {(run.sweep, run.launch) for run in runs} == {(tmp_path / "sweep", None)}
    reason = "cannot be read (Permission denied): its owner alone can"
    assert capsys.readouterr().err == f"note: {tmp_path}/sweep/.launch/sweep.json {reason}\n"


def refused_without(capsys: pytest.CaptureFixture[str], run_dir: Path) -> str:
    """Returns what `resume` prints for a run that has ended without a launcher."""
    write_lock(run_dir, dataclasses.replace(Holder.current(), born="1"))
    return refused(capsys, "resume", run_dir, code=1)
