"""The table of runs, read from their files and from SLURM if it responds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.runs import VIT, rows, small
from helpers.sweeps import idle_process, make_sweep, refused, set_launcher, states, write_lock

from clipx.run.lock import LOCK, Holder
from clipx.trainer.trainer import Trainer
from clipx_launch.__main__ import main
from clipx_launch.cluster import Job
from clipx_launch.commands import status
from clipx_launch.commands.runs import runs_in, sweep_runs
from clipx_launch.commands.state import state_of
from clipx_launch.point import Result


def run_with(folder: Path, age: float, *events: dict[str, object], now: float | None = None) -> None:
    row = {"step": 3, "samples": 30, "epoch": 0.1, "seconds": (now or time.time()) - age, "train/loss": 1.0}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").touch()
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "cut')


def test_incomplete_metrics_and_events_lose_only_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, now = tmp_path / "runs" / "one", time.time()
    run.parent.mkdir()
    run_with(run, 2, {"event": "start", "time": now - 9}, {"event": "end", "time": now}, now=now)
    for name in ("metrics.jsonl", "events.jsonl"):
        path = run / name
        path.write_text('{"step": 1, "eve\n' + path.read_text())
    with (run / "events.jsonl").open("ab") as file:  # on the incomplete last line
        file.write(b'{"time": 0, "event": "requeued"}\n{"time": 0, "event": "end"}\n')
    (found,) = runs_in([tmp_path])
    assert [row["step"] for row in found.rows] == [3]
    assert [e["event"] for e in found.events] == ["start", "end", "requeued", "end"]
    assert main(["status", str(tmp_path)]) == 0
    assert "runs/one │ finished │    3" in capsys.readouterr().out


def test_a_finished_run_is_shown_with_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "runs" / "one"
    Trainer(small(run_dir, *VIT, "checkpoint.every=end", "duration=1ep", "evaluator=[retrieval]")).fit()
    capsys.readouterr()
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    logged = rows(run_dir)
    for part in (
        "runs/one",
        "finished",
        "8 / 8",
        "retrieval/image_to_text/recall@1",
        f"{logged[-2]['train/loss']:.4f}",
    ):
        assert part in shown
    assert re.search(r"step 8, \d\d:\d\d ago", shown)

    assert main(["status", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (run,) = document["runs"]
    assert set(run) == {
        "run", "folder", "index", "job", "requeues", "state", "reason", "overrides", "step", "steps", "loss", "metrics",
        "best", "samples_per_second", "seconds", "last_line", "checkpoint",
    }  # fmt: skip
    assert (run["run"], run["state"], run["step"], run["steps"], run["job"]) == ("runs/one", "finished", 8, 8, None)
    number = logged[-1]["eval/retrieval/text_to_image/recall@1"]
    assert run["metrics"]["eval/retrieval/text_to_image/recall@1"] == {"value": number, "step": 8}
    assert run["checkpoint"]["step"] == 8
    assert run["seconds"] > 0


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


def test_a_run_without_its_process_is_lost_locally_and_silent_remotely(tmp_path: Path) -> None:
    run_with(tmp_path, 5000, START)
    with idle_process() as (child, holder):
        write_lock(tmp_path, holder)
        assert runs_in([tmp_path])[0].state == "silent"
        child.kill()
        child.wait()
        (lost,) = runs_in([tmp_path])
        assert (lost.state, lost.reason) == ("lost", "its process has ended without a result")
        write_lock(tmp_path, replace(holder, machine="another"))
        assert runs_in([tmp_path])[0].state == "silent", "its lock is fresh"


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


@pytest.mark.parametrize(
    ("job", "error", "expected"),
    [
        ("PREEMPTED", "SIGTERM: stopped after step 3", ("preempted", "SIGTERM: stopped after step 3")),
        ("CANCELLED", "SIGTERM: stopped after step 3", ("cancelled", "SIGTERM: stopped after step 3")),
        ("PREEMPTED", None, ("preempted", "job 7 is preempted")),
        ("NODE_FAIL", None, ("failed", "job 7 is node_fail")),
    ],
)
def test_a_preempted_job_that_is_not_requeued_is_preempted(
    tmp_path: Path, job: str, error: str | None, expected: tuple[str, str]
) -> None:
    point = make_sweep(tmp_path, ["seed=0"]).planned[0].point
    point.record_job("7", None)
    if error is not None:
        point.write_result(Result("stopped", 75, error=error))
    (run,) = sweep_runs(tmp_path)
    assert state_of(run, {"7": Job(job)}, time.time()) == expected


def test_only_overrides_that_differ_between_points_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sweep(tmp_path / "old", ["seed=0", "optimizer.lr=1e-3"], ["seed=1", "optimizer.lr=1e-3"])
    folder = (tmp_path / "old").rename(tmp_path / "new")
    runs = sweep_runs(folder)
    assert [run.varied for run in runs] == [{"seed": "0"}, {"seed": "1"}]
    assert [run.folder for run in runs] == [folder / "0", folder / "1"], "the sweep was moved"
    main(["status", str(folder)])
    assert "seed=1" in (shown := capsys.readouterr().out)
    assert "lr" not in shown


@pytest.mark.parametrize("command", [["status"], ["results", "--metric", "train/loss"]])
def test_overrides_and_reasons_are_not_read_as_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    sweep = make_sweep(tmp_path, ["evaluator=[]"], ["evaluator=[zeroshot]"])
    point = sweep.planned[0].point
    point.overrides.append("+note=[/x]")
    point.write()
    run_with(tmp_path / "0", 5, START)
    point.write_result(Result("failed", 1, error="an odd [/y] \x1b[2J"))
    assert main([command[0], str(tmp_path), *command[1:]]) == 0
    shown = capsys.readouterr().out
    assert "[/x]" in shown
    assert "[zeroshot]" in shown
    if command == ["status"]:
        assert r"an odd [/y] \x1b[2J" in shown


def test_runs_of_several_folders_are_named_with_their_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_sweep(tmp_path / name, ["seed=0"])
    run_with(tmp_path / "c", 5, START)
    folders = [tmp_path / name for name in "abc"]
    assert [run.name for run in runs_in(folders)] == [f"{tmp_path}/a/0", f"{tmp_path}/b/0", f"{tmp_path}/c"]
    assert [run.name for run in runs_in([tmp_path])] == ["a/0", "b/0", "c"]
    assert [run.name for run in runs_in(folders[:1])] == ["0"]


def test_watch_ends_with_the_last_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_POLL_S", 0.05)
    run_with(tmp_path / "run", 5, START)
    with idle_process() as (child, holder):
        write_lock(tmp_path / "run", holder)
        watch = threading.Thread(target=main, args=(["status", str(tmp_path), "--watch"],))
        watch.start()
        watch.join(1)
        assert watch.is_alive()
        child.kill()
        child.wait()
        watch.join(600)
        assert not watch.is_alive()
    out = capsys.readouterr().out
    assert "its process has ended" in out
    assert out.endswith("\n")


def broken_point(folder: Path) -> list[str]:
    make_sweep(folder / "s", ["seed=0"])
    (folder / "s/0/.launch/point.json").write_text('{"index": 0}')
    return ["status", str(folder)]


def truncated_sweep(folder: Path) -> list[str]:
    make_sweep(folder / "s", ["seed=0"])
    (folder / "s/.launch/sweep.json").write_text("{")
    return ["best", str(folder / "s")]


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (lambda folder: ["status", str(folder)], 2, "{folder} contains no run: give a folder of runs"),
        (lambda folder: ["status", "nowhere"], 2, "/nowhere does not exist: check the path"),
        (lambda folder: ["cancel", str(folder)], 2, "{folder} contains no sweep (no .launch/sweep.json): give the hydra.sweep.dir of a sweep"),
        (broken_point, 1, "{folder}/s/0/.launch/point.json cannot be read: restore it, or delete it and launch again"),
        (truncated_sweep, 1, "{folder}/s/.launch/sweep.json cannot be read: restore it, or delete it and launch again"),
        (lambda folder: ["status", "--watch", "--json"], 2, "argument --json: not allowed with argument --watch: clipx-sweep status --help lists the commands and options"),
        (lambda folder: ["stats"], 2, "argument COMMAND: invalid choice: 'stats' (choose from 'status', 'logs', 'cancel', 'resume', 'best', 'results', 'report', 'script'): clipx-sweep --help lists the commands and options"),
        (lambda folder: ["logs", str(folder), "--lines", "-1"], 2, "--lines=-1 must be 0 (all) or more"),
        (lambda folder: ["cancel", str(folder), "--wait=nan"], 2, "--wait=nan must be 0 s or more: the default is 120"),
    ],
)  # fmt: skip
def test_invalid_commands_and_folders_print_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: Callable[[Path], list[str]], code: int, message: str
) -> None:
    assert refused(capsys, *typed(tmp_path), code=code).endswith(message.format(folder=tmp_path) + "\n")


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    run_with(tmp_path, 5, START)
    code = f"import sys; from clipx_launch.__main__ import main; main(['status', {str(tmp_path)!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.endswith("False\n")
    assert "running" in done.stdout


def test_an_unreadable_lock_is_ignored(tmp_path: Path) -> None:
    run_with(tmp_path, 5, START)
    (tmp_path / LOCK).write_text("{")
    assert runs_in([tmp_path])[0].state == "running"
    write_lock(tmp_path, Holder.current())
    assert runs_in([tmp_path])[0].state == "running"
