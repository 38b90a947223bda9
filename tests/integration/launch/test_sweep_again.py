"""Cancelling and resuming sweeps of local processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.runs import VIT
from helpers.slurm_jobs import launch_json, logs, rows
from helpers.sweeps import idle_process, make_sweep, refused, run_named, set_launcher, states, train, write_lock

from clipx_launch.__main__ import main
from clipx_launch.options import LocalSpec
from clipx_launch.point import Result
from clipx_launch.sweep import Sweep


def test_cancelling_a_point_sends_sigterm_only_to_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path, ["seed=0"], ["seed=1"], ["seed=2"])
    with idle_process() as (launcher, keeper), idle_process() as (one, first), idle_process() as (other, second):
        set_launcher(tmp_path, keeper)
        write_lock(sweep.planned[0].point.folder, first)
        write_lock(sweep.planned[1].point.folder, second)
        assert main(["cancel", str(tmp_path), "1"]) == 0
        assert capsys.readouterr().out == f"cancelled point 1: SIGTERM to {second}\n"
        assert other.wait(600) == -signal.SIGTERM
        assert (one.poll(), launcher.poll()) == (None, None)

        alone = "point 2 has not started and cannot be cancelled alone: cancel the whole sweep"
        assert alone in refused(capsys, "cancel", tmp_path, "2", code=1)
        assert main(["cancel", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"cancelled 2 waiting, 1 starting: SIGTERM to their launcher, {keeper}\n"
        assert launcher.wait(600) == -signal.SIGTERM
        assert one.poll() is None, "only its launcher, which does not exist here, would signal it"
        assert main(["cancel", str(tmp_path)]) == 0, "a point without its launcher was not signalled"
        assert one.wait(600) == -signal.SIGTERM
    capsys.readouterr()
    assert main(["cancel", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to cancel: 3 lost\n"


def test_resume_relaunches_only_failed_points_with_their_launch_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point 0 is finished, point 1 was killed after its checkpoint of step 2 of 4, point 2 is running."""
    settings = LocalSpec(environment={"TQDM_DISABLE": "of the launch"}, snapshot=False)
    common = (*VIT, "evaluator=[]", "checkpoint.every=2st", "checkpoint.keep_last=2")
    (tmp_path / "launched").mkdir()
    monkeypatch.chdir(tmp_path / "launched")
    made = make_sweep(tmp_path / "s", ["seed=0"], ["seed=1"], ["seed=2"], common=common, spec=settings)
    monkeypatch.chdir(tmp_path)
    sweep, killed = tmp_path / "s", made.planned[1].point
    made.planned[0].point.write_result(Result("finished", value=0.5))
    train_to_step_2(made)
    before = (sweep / "0/.launch/point.json").stat().st_mtime_ns, run_named(sweep, "0").rows
    with idle_process() as (_, gone):
        set_launcher(sweep, gone)
    with idle_process() as (_, worker):
        write_lock(made.planned[2].point.folder, worker)
        assert [states(sweep)[name][0] for name in "012"] == ["finished", "lost", "starting"]
        assert main(["resume", str(sweep)]) == 0, capsys.readouterr().err
        assert states(sweep)["2"][0] == "starting"
    assert states(sweep)["1"][0] == "finished", logs(killed.folder)
    assert [row["step"] for row in rows(killed.folder)] == [1, 2, 3, 4], "a step was logged twice or not at all"
    assert ((sweep / "0/.launch/point.json").stat().st_mtime_ns, run_named(sweep, "0").rows) == before
    first, again = launch_json(sweep, "sweep")["launches"]
    assert again["settings"] == first["settings"]
    assert [point["launch"] for point in launch_json(sweep, "sweep")["points"]] == [0, 1, 0]


def train_to_step_2(sweep: Sweep) -> None:
    """Leaves point 1 in the state of a run killed after its first checkpoint."""
    planned = sweep.planned[1]
    run = planned.point.folder
    train(planned)
    (run / ".launch/result.json").unlink()
    for path in sorted((run / "checkpoints/step-00000004").iterdir()):
        path.unlink()
    (run / "checkpoints/step-00000004").rmdir()
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:3]))
