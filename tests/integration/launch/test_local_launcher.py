"""Sweeps in local processes, through `hydra/launcher=clipx_local`."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import yaml
from helpers import PLUGINS
from helpers.runs import SMALL, VIT, run, start
from helpers.slurm_jobs import LOCAL, QUICK, held, launch, launch_json, logs, losses, release, rows, wait_for_steps
from helpers.sweeps import idle_process, make_sweep, refused, set_launcher, states, write_lock

from clipx_launch.__main__ import main

PLUGIN = PLUGINS / "faults"
LONG = (*SMALL, *VIT, "duration=20st", "checkpoint.every=end")


@pytest.mark.slow
def test_parallel_points_get_separate_devices_and_fail_independently(tmp_path: Path) -> None:
    sweep = tmp_path / "s, 1"
    two = ("hydra.launcher.tasks_per_node=2", "hydra.launcher.parallelism=2", f"hydra.sweep.dir='{sweep}'")
    options = ("--config-dir", str(PLUGIN), *LOCAL, *QUICK, *VIT, *two, "objective=faulty")
    done = launch(*options, "objective.rank=null,1", check=False, CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert done.returncode == 1
    assert "point 1 (objective.rank=1) failed: RuntimeError: a bug of rank 1" in done.stderr
    assert [launch_json(sweep / point, "result")["state"] for point in "01"] == ["finished", "failed"]
    assert "devices=4,5\n" in logs(sweep / "0")
    assert "devices=6,7\n" in logs(sweep / "1")
    assert "on 2 x cpu" in logs(sweep / "0")
    assert len(losses(sweep / "0")) == 4
    assert "Traceback" in (sweep / "1/.launch/logs/local.1.log").read_text()

    before = (sweep / "0/metrics.jsonl").stat().st_mtime_ns
    again = launch(*options, "objective.rank=null")
    assert "point 0  finished before" in again.stdout
    assert (sweep / "0/metrics.jsonl").stat().st_mtime_ns == before
    other = launch(*options, "objective.rank=null", "seed=3", check=False)
    assert other.returncode == 2
    said = f"{sweep}/0 already holds a run: continue it with resume=auto, or give this run another name="
    assert said in other.stderr


def test_a_sweep_without_a_launcher_trains_a_point_after_the_other_and_resumes(tmp_path: Path) -> None:
    sweep = start(
        tmp_path / "command",
        "-m",
        "clipx.train",
        "-m",
        *LONG,
        *held(tmp_path),
        "seed=0,1",
        f"hydra.sweep.dir={tmp_path}",
    )
    wait_for_steps(tmp_path / "0")
    sweep.send_signal(signal.SIGINT)
    out, errors = sweep.communicate(timeout=600)
    assert sweep.returncode == 75
    assert errors == (
        f"stopped: SIGINT: 0 of 2 points are finished; clipx-sweep resume {tmp_path}, or the same command with "
        f"hydra.sweep.dir={tmp_path}, continues\n"
    )
    assert f" in {tmp_path}/0\n" in out, "rank 0's output is not printed"
    found = states(tmp_path)
    assert found["0"][0] == "cancelled" and found["0"][1].startswith("SIGINT: stopped after step ")
    assert found["1"][0] == "lost" and re.fullmatch(r"not started: its launcher, pid \d+ .*, has ended", found["1"][1])
    release(tmp_path)
    done = run(sys.executable, "-m", "clipx", "sweep", "resume", str(tmp_path))
    assert done.stdout.count("finished") == 2
    steps = list(range(1, 21))
    assert [[row["step"] for row in rows(tmp_path / point)] for point in "01"] == [steps, steps], (
        "a step was logged twice or not at all"
    )
    specs = [yaml.safe_load((tmp_path / point / "config.yaml").read_text()) for point in "01"]
    assert [(spec["seed"], spec["run_dir"]) for spec in specs] == [(0, f"{tmp_path}/0"), (1, f"{tmp_path}/1")]
    assert main(["status", str(tmp_path), "--best"]) == 0


def test_cancelling_a_point_sends_sigterm_only_to_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_sweep(tmp_path, ["seed=0"], ["seed=1"], ["seed=2"])
    with idle_process() as (launcher, keeper), idle_process() as (one, first), idle_process() as (other, second):
        set_launcher(tmp_path, keeper)
        write_lock(sweep.planned[0].point.folder, first)
        write_lock(sweep.planned[1].point.folder, second)
        assert main(["cancel", str(tmp_path / "1")]) == 0
        assert capsys.readouterr().out == f"cancelled point {tmp_path / '1'}: SIGTERM to {second}\n"
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


@pytest.mark.slow
def test_commands_follow_the_runs_that_finish_and_a_command_is_told_of_each_end(tmp_path: Path) -> None:
    """Their results are where the commands write them without a launcher; a run that failed is followed by none."""
    sweep, alerts = tmp_path / "s", tmp_path / "alerts"
    on_end = f'hydra.launcher.on_end="echo \\"$CLIPX_STATE|$CLIPX_REASON|$CLIPX_FOLDER\\" >> {alerts}"'
    faulty = ("--config-dir", str(PLUGIN), "objective=faulty", "objective.rank=null,0")
    then = 'hydra.launcher.then=["export format=safetensors"]'
    done = launch(*LOCAL, *faulty, *SMALL, f"hydra.sweep.dir={sweep}", then, on_end, check=False)
    assert done.returncode == 1
    assert "point 1/export  objective.rank=0  stopped: not started: point 1 has not finished" in done.stdout
    assert (sweep / "0/exports/model.safetensors").is_file()
    found = {name: of for name, (of, _) in states(sweep).items()}
    assert found == {"0": "finished", "0/export": "finished", "1": "failed", "1/export": "cancelled"}
    assert sorted(alerts.read_text().splitlines()) == [
        f"failed|RuntimeError: a bug of rank 0|{sweep}/1", f"finished||{sweep}/0", f"finished||{sweep}/0/export",
    ]  # fmt: skip


@pytest.mark.slow
def test_what_a_launched_command_prints_is_in_the_folder_of_its_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*SMALL, "evaluator=[retrieval]")
    launch(*LOCAL, *options, f"hydra.sweep.dir={tmp_path}/s")
    metric = "eval/retrieval/image_to_text/recall@5"
    expected = {"overrides": list(options), "metrics": {metric: {"value": 0.5, "tolerance": 1, "source": "Table 1"}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(expected))
    given = (f"run={tmp_path}/s/0", f"expected={tmp_path}/mine.yaml", f"hydra.sweep.dir={tmp_path}/c")
    done = launch(*LOCAL, *given, command="clipx.check")
    assert "point 0  finished" in done.stdout
    assert metric in (tmp_path / "c/0/output.txt").read_text()
    assert states(tmp_path / "c")["0"] == ("finished", "")
    for command in (("results",), ("report",), ("status", "--best")):
        assert "all points are of other commands than clipx.train" in refused(capsys, *command, tmp_path / "c")
