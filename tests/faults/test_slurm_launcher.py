"""Sweeps and runs on a real SLURM, through `hydra/launcher=clipx_slurm`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import PLUGINS
from helpers.runs import SMALL, VIT, small, start
from helpers.slurm_jobs import (
    QUICK,
    SLURM,
    held,
    job_of,
    launch,
    launch_json,
    logs,
    losses,
    output_of,
    release,
    rows,
    slurm_tasks,
    sweep_jobs,
    wait_for_job,
    wait_for_steps,
)
from helpers.sweeps import make_sweep, run_named, states
from helpers.waiting import wait_until

from clipx.config.typed import last_of_each
from clipx.errors import ConfigError
from clipx.trainer.trainer import Trainer
from clipx_launch import slurm as of_slurm
from clipx_launch.__main__ import main
from clipx_launch.site_check import expected_start
from clipx_launch.slurm_spec import SlurmSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm")]
LONG = (*SMALL, "data.workers=1", "duration=40st", "checkpoint.every=end")
FOUR = ("hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2", "hydra.launcher.gpus_per_node=0")


def test_a_sweep_is_an_array_that_returns_values_and_skips_finished_points(tmp_path: Path) -> None:
    sweep = tmp_path / "a sweep, lr=1"
    options = (
        *SLURM,
        f"hydra.sweep.dir='{sweep}'",
        "hydra.launcher.array_parallelism=2",
        *QUICK,
        "evaluator=[retrieval]",
    )
    done = launch(*options, "hydra.launcher.wait=true", "seed=0,1,2")
    job = job_of(done.stdout)
    assert f"{sweep}: 3 of 3 points submitted" in done.stdout
    assert "point 2  seed=2  finished 0" in done.stdout
    assert wait_for_job(job) == ["COMPLETED"] * 3
    assert {task["ArrayTaskThrottle"] for task in slurm_tasks(job)} == {"2"}
    for task in range(3):
        point = launch_json(sweep / f"{task}", "point")
        assert (point["job"], point["task"], point["requeues"]) == (job, task, 0)
        assert f"seed={task}" in point["overrides"]
        result = launch_json(sweep / f"{task}", "result")
        assert result["state"] == "finished"
        assert 0 <= result["value"] <= 1
        assert "run directory" in (sweep / f"{task}/.launch/logs/{job}_{task}.0.log").read_text()
        assert f"seed: {task}\n" in (sweep / f"{task}/.launch/config.yaml").read_text()
        assert (sweep / f"{task}/.launch/script.sh").read_text().startswith("#!/bin/bash")
    assert len({tuple(losses(sweep / f"{task}")) for task in range(3)}) == 3
    again = launch(*options, "hydra.launcher.wait=true", "seed=0,1,2,3")
    assert f"{sweep}: 1 of 4 points submitted (3 finished before)" in again.stdout
    assert launch_json(sweep / "3", "point")["job"] == job_of(again.stdout)
    assert sweep_jobs(sweep) == [job] * 3 + [job_of(again.stdout)]


def test_two_nodes_of_two_tasks_match_a_single_process(tmp_path: Path) -> None:
    common = ("checkpoint=none", *VIT)
    sweep = (f"run_dir={tmp_path}/four", f"hydra.sweep.dir={tmp_path}/s")
    job = job_of(launch(*SLURM, *FOUR, *SMALL, *common, *sweep).stdout)
    Trainer(small(tmp_path / "one", *common)).fit()
    assert wait_for_job(job) == ["COMPLETED"], logs(tmp_path / "four")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert "on 4 x cpu" in logs(tmp_path / "four")
    assert len(list((tmp_path / "four/.launch/logs").glob(f"{job}.[0-3].log"))) == 4


def test_a_stopped_run_saves_and_resumes_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stops a run by the signal that precedes a time limit, with no requeue left, and by `clipx-sweep cancel`.

    The job is not requeued after it; its SIGTERM reaches the loader process as well.
    """
    point = tmp_path / "0"
    own = (f"hydra.sweep.dir={tmp_path}", "hydra.launcher.max_num_timeout=0")
    options = (*SLURM, *LONG, *held(tmp_path), *own)
    job = job_of(launch(*options).stdout)
    wait_for_steps(point)
    assert "0 of 1 points submitted (1 in the queue)" in launch(*options).stdout
    output_of("scancel", "--signal=USR1", job)
    assert wait_for_job(job) == ["FAILED"]
    assert launch_json(point, "result")["state"] == "stopped"
    batch = (tmp_path / f".launch/logs/{job}.log").read_text()
    assert "stopped and saved, but not requeued (hydra.launcher.max_num_timeout=0)" in batch
    done = len(rows(point))
    assert [path.name for path in (point / "checkpoints").glob("step-*")] == [f"step-{done:08d}"]

    job = job_of(launch(*options).stdout)
    wait_for_steps(point, done + 2)
    assert main(["cancel", str(tmp_path)]) == 0
    saved = len(rows(point))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIGTERM to 1 running: waiting up to 120 s (--wait) for them to save")
    how = f"cancelled point 0, job {job}, which was running: SIGTERM: stopped after step {saved} of 40, saved; "
    assert lines[1].startswith(how)
    assert (point / f"checkpoints/step-{saved:08d}").is_dir()
    assert wait_for_job(job) == ["CANCELLED"]
    assert slurm_tasks(job)[0]["Restarts"] == "0"
    assert states(tmp_path)["0"][0] == "cancelled"

    release(tmp_path)
    launch(*options, "hydra.launcher.wait=true")
    assert launch_json(point, "result")["state"] == "finished"
    assert [row["step"] for row in rows(point)] == list(range(1, 41)), "a step was logged twice or not at all"


def test_a_failed_rank_fails_its_job_which_runs_the_code_of_the_submission(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(PLUGINS / "faults", mine)
    faulty = mine / "objective" / "faulty.py"
    options = (*SLURM, *FOUR, "objective=faulty", "objective.rank=2", *QUICK, f"hydra.sweep.dir={tmp_path}/s")
    job = job_of(
        launch("--config-dir", str(mine), *options, "+hydra.launcher.additional_parameters={hold: true}").stdout
    )
    faulty.write_text("raise RuntimeError('edited since')")
    output_of("scontrol", "release", job)
    point = tmp_path / "s" / "0"
    assert wait_for_job(job) == ["FAILED"], logs(point)
    assert slurm_tasks(job)[0]["ExitCode"] == "1:0"
    failed = {"state": "failed", "exit_code": 1, "value": None, "error": "RuntimeError: a bug of rank 2"}
    assert launch_json(point, "result") == failed
    log = (point / f".launch/logs/{job}.2.log").read_text()
    assert "Traceback" in log
    assert 'raise RuntimeError(f"a bug of rank' in log


def test_a_second_job_of_the_same_script_changes_nothing_of_the_first(tmp_path: Path) -> None:
    """The script is submitted while the run trains, and again when it has finished."""
    point, script = tmp_path / "run", tmp_path / "job.sh"
    words = last_of_each([*LONG, *held(tmp_path), f"run_dir={point}"])
    print_script = (sys.executable, "-m", "clipx_launch", "script", "gpus_per_node=0", "cpus_per_task=1", "--")
    script.write_text(output_of(*print_script, *words))

    def submit() -> str:
        return output_of("sbatch", "--parsable", str(script))

    first = submit()
    wait_for_steps(point)
    second = submit()
    assert wait_for_job(second) == ["FAILED"]
    assert slurm_tasks(second)[0]["ExitCode"] == "3:0"
    assert f"is in use by pid {json.loads((point / 'run.lock').read_text())['pid']} on " in logs(point)
    assert (states(point)[str(point)][0], run_named(point, str(point)).job) == ("running", first)
    release(tmp_path)
    assert wait_for_job(first) == ["COMPLETED"], logs(point)
    files = {path: path.read_bytes() for path in point.rglob("*") if path.is_file()}
    assert launch_json(point, "result")["state"] == "finished"
    third = submit()
    assert wait_for_job(third) == ["COMPLETED"], logs(point)
    assert "an earlier job has finished this point: nothing is done" in logs(point)
    assert {path: path.read_bytes() for path in files} == files
    assert run_named(point, str(point)).job == first


@pytest.mark.parametrize("where", ["hydra.sweep.dir", "run_dir"])
def test_two_launches_at_once_submit_each_point_once(tmp_path: Path, where: str) -> None:
    for number in range(3):
        words = (
            *SLURM,
            *QUICK,
            "+hydra.launcher.additional_parameters={hold: true}",
            "seed=1",
            f"{where}={tmp_path}/{number}",
        )
        both = [start(tmp_path / f"{number}{name}", "-m", "clipx.train", *words) for name in "ab"]
        said = [process.communicate(timeout=600) for process in both]
        codes = sorted(int(process.returncode) for process in both)
        jobs = sweep_jobs(tmp_path / str(number))
        assert codes in ([0, 0], [0, 3]) and len(jobs) == 1, said
        output_of("scancel", *jobs)
        for process, (out, errors) in zip(both, said, strict=True):
            refused = process.returncode == 3 and errors.count("\n") == 1 and " is in use by pid " in errors
            assert refused or "1 of 1 points submitted" in out or "0 of 1 points submitted (1 in the queue)" in out, (
                said
            )


def test_a_job_that_asked_for_gpus_and_sees_none_fails(tmp_path: Path) -> None:
    """SLURM gives it a device that torch does not find."""
    words = (*SLURM[:-2], "hydra.launcher.cpus_per_task=1", "hydra.launcher.gpus_per_node=1")
    job = job_of(launch(*words, *QUICK, f"run_dir={tmp_path}/run").stdout)
    assert wait_for_job(job) == ["FAILED"]
    result = launch_json(tmp_path / "run", "result")
    assert result["exit_code"] == 2 and "(SLURM_GPUS_ON_NODE=1), but torch " in result["error"]


SITE = """\
defaults: [submitit_slurm]
submitit_folder: ${hydra.sweep.dir}/.submitit/%j
name: ${hydra.job.name}
partition: main
timeout_min: 30
cpus_per_task: 1
gpus_per_node: 0
tasks_per_node: 2
mem_gb: 4
nodes: 1
comment: of-site
signal_delay_s: 60
max_num_timeout: 3
additional_parameters: {nice: 5}
array_parallelism: 1
setup: ["export OF_SITE=1"]
stderr_to_stdout: true
"""


def test_a_file_for_submitit_slurm_works_with_one_changed_line(tmp_path: Path) -> None:
    files = tmp_path / "site/hydra/launcher"
    files.mkdir(parents=True)
    (files / "site.yaml").write_text(SITE.replace("[submitit_slurm]", "[clipx_slurm]"))
    words = ("-m", "--config-dir", str(tmp_path / "site"), "hydra/launcher=site", *QUICK, "seed=0,1")
    done = launch(*words, f"hydra.sweep.dir={tmp_path}/s", "hydra.launcher.wait=true")
    job = job_of(done.stdout)
    assert re.search(r"^  start   \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d on n[12], as SLURM expects$", done.stdout, re.M)
    assert wait_for_job(job) == ["COMPLETED"] * 2
    jobs = {(task["TimeLimit"], task["NumTasks"], task["Comment"]) for task in slurm_tasks(job)}
    assert jobs == {("00:30:00", "2", "of-site")}
    assert {task["ArrayTaskThrottle"] for task in slurm_tasks(job)} == {"1"}
    script = (tmp_path / f"s/.submitit/{job}/{job}_submission.sh").read_text()
    for line in ("--mem=4096M", "--nice=5", "--signal=USR2@60"):
        assert f"#SBATCH {line}\n" in script
    assert script == (tmp_path / "s/1/.launch/script.sh").read_text() and "\nexport OF_SITE=1\n" in script
    assert "on 2 x cpu" in logs(tmp_path / "s/0")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "none"}, "SLURM can never start this job (Invalid partition name specified) with "
         "hydra.launcher.partition=none: choose one of low, main"),
        ({"nodes": 3}, "configuration is not available) with hydra.launcher.nodes=3: lower "),
        ({"cpus_per_task": 99}, "configuration is not available) with hydra.launcher.cpus_per_task=99: lower "),
        ({"mem_gb": 64.0}, "configuration is not available) with hydra.launcher.mem_gb=64.0: lower "),
        ({"tasks_per_node": 4, "cpus_per_task": 4}, "configuration is not available) with "
         "hydra.launcher.tasks_per_node=4 or hydra.launcher.cpus_per_task=4: lower "),
        ({"tasks_per_node": 4, "gpus_per_node": "fake:4"}, "is not available) with hydra.launcher.gpus_per_node=fake:4: "),
        ({"gpus_per_node": "a100:1"}, "is not available) with hydra.launcher.gpus_per_node=a100:1: lower "),
        ({"constraint": "h200"}, "(Invalid feature specification) with hydra.launcher.constraint=h200: lower "),
        ({"additional_parameters": {"reservation": "mine"}}, "(Requested reservation is invalid) with "
         "hydra.launcher.additional_parameters.reservation=mine: lower "),
    ],
)  # fmt: skip
def test_an_option_that_no_node_can_fulfil_is_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    spec = SlurmSpec(**{"gpus_per_node": "0", "cpus_per_task": 1, **options})
    with pytest.raises(ConfigError) as raised:
        expected_start(spec, tmp_path, tmp_path / "0")
    assert says in str(raised.value)


def test_a_job_waits_for_nodes_that_are_down_and_not_for_a_time_limit_above_the_partitions(tmp_path: Path) -> None:
    spec = SlurmSpec(gpus_per_node="0", cpus_per_task=1, nodes=2, timeout_min=61, partition="low")
    output_of("scontrol", "update", "PartitionName=low", "MaxTime=60")
    try:
        with pytest.raises(
            ConfigError, match=r"timeout_min=61 is more than partition low allows: lower it to at most 60"
        ):
            expected_start(spec, tmp_path, tmp_path / "0")
        spec = replace(spec, timeout_min=60)
        assert expected_start(spec, tmp_path, tmp_path / "0").endswith(" on n[1-2], as SLURM expects")
        output_of("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
        says = "unknown, for nodes are down or drained (Requested node configuration is not available)"
        assert expected_start(spec, tmp_path, tmp_path / "0") == says
    finally:
        output_of("scontrol", "update", "PartitionName=low", "MaxTime=UNLIMITED")
        output_of("scontrol", "update", "NodeName=n1", "State=RESUME")


def test_the_stock_slurm_launcher_works(tmp_path: Path) -> None:
    stock = ("-m", "hydra/launcher=submitit_slurm", f"hydra.sweep.dir={tmp_path}", "hydra.launcher.timeout_min=5")
    launch(*stock, *QUICK, "seed=0,1")
    assert losses(tmp_path / "0") != losses(tmp_path / "1")


HELD = SlurmSpec(
    gpus_per_node="0", cpus_per_task=2, name="mine", array_parallelism=2, additional_parameters={"hold": True}
)


@pytest.fixture
def submitted(slurm: Path, tmp_path: Path) -> Iterator[Path]:
    """Submits three points that stay in SLURM's queue."""
    sweep = make_sweep(tmp_path, ["seed=0"], ["seed=1"], ["seed=2"], spec=HELD)
    of_slurm.launch(sweep, HELD)
    try:
        yield tmp_path
    finally:
        output_of("scancel", *set(sweep_jobs(tmp_path)))


def test_queued_points_are_cancelled_and_resumed_individually(
    submitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = sweep_jobs(submitted)[0]
    assert {name: state for name, (state, _) in states(submitted).items()} == dict.fromkeys("012", "waiting")
    assert states(submitted)["0"][1] == "JobHeldUser"
    assert [run_named(submitted, name).job for name in "012"] == [f"{job}_{task}" for task in range(3)]

    assert main(["cancel", str(submitted), "1"]) == 0
    assert capsys.readouterr().out == f"cancelled point 1, job {job}_1, which was waiting\n"
    assert [states(submitted)[name][0] for name in "012"] == ["waiting", "cancelled", "waiting"]

    output_of("scancel", f"{job}_2")
    failed = submitted / f"2/.launch/{job}_2/result.json"
    failed.parent.mkdir()
    failed.write_text('{"state": "failed", "exit_code": 1, "error": "a bug"}')
    assert main(["resume", str(submitted)]) == 0
    printed = capsys.readouterr().out
    assert f"{submitted}: 2 of 2 points submitted" in printed
    for verb in ("status", "logs", "cancel"):
        assert f"  {verb:7} clipx-sweep {verb} {submitted}\n" in printed
    first, again, other = sweep_jobs(submitted)
    assert first == job and again == other != job
    assert [states(submitted)[name][0] for name in "012"] == ["waiting"] * 3
    assert {
        (task["JobName"], task["NumCPUs"], task["ArrayTaskThrottle"], task["JobState"]) for task in slurm_tasks(again)
    } == {("mine", "2", "2", "PENDING")}
    assert len(launch_json(submitted, "sweep")["launches"]) == 1, "the same settings were stored twice"

    assert main(["cancel", str(submitted)]) == 0
    assert capsys.readouterr().out.count("cancelled point") == 3
    assert {state for state, _ in states(submitted).values()} == {"cancelled"}
    assert main(["cancel", str(submitted)]) == 0
    assert capsys.readouterr().out == "nothing to cancel: 3 cancelled\n"


def test_cancelling_the_last_task_leaves_the_others_and_a_resumed_run_is_followed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM gives the last task of an array the number of the array. What follows the cancelled run never starts."""
    sweep = tmp_path / "s"
    then = 'hydra.launcher.then=["export format=safetensors"]'
    launch(*SLURM, *LONG, *held(sweep), f"hydra.sweep.dir={sweep}", "seed=0,1", then)
    for point in "01":
        wait_for_steps(sweep / point)
    job = launch_json(sweep / "0", "point")["job"]
    named = output_of("squeue", "--noheader", "--array", "--format=%j %k", f"--jobs={job}").splitlines()
    assert sorted(named) == [f"s/0 {sweep}/0", f"s/1 {sweep}/1"]
    assert main(["cancel", str(sweep), "1"]) == 0
    wait_until(lambda: states(sweep)["1/export"][0] == "cancelled", lambda: str(states(sweep)))
    found = states(sweep)
    assert (found["0"][0], found["0/export"]) == ("running", ("waiting", "after 0"))
    assert (found["1"][0], found["1/export"][1]) == ("cancelled", "not started: point 1 has not finished")

    capsys.readouterr()
    assert main(["resume", str(sweep)]) == 0
    assert f"{sweep}: 2 of 2 points submitted" in capsys.readouterr().out
    # Another command, as an array of its own, after all that the sweep still runs.
    runs = f"run={sweep}/0,{sweep}/1"
    cpu = ("--config-dir", str(PLUGINS / "faults"), "evaluator=[retrieval]", "distributed=cpu", "data.workers=0")
    after = (f"hydra.launcher.after={sweep}", f"hydra.sweep.dir={tmp_path}/evaluated")
    evaluated = launch(*SLURM, runs, *cpu, *after, command="clipx.evaluate").stdout
    assert f"{tmp_path}/evaluated: 2 of 2 points submitted" in evaluated
    waits_for = {task["Dependency"] for task in slurm_tasks(job_of(evaluated))}
    assert all(f"afterok:{job}_0(unfulfilled)" in dependency for dependency in waits_for), waits_for
    release(sweep)
    assert wait_for_job(job_of(evaluated)) == ["COMPLETED"] * 2, logs(tmp_path / "evaluated/0")
    assert {of for of, _ in states(sweep).values()} == {"finished"}
    assert [(sweep / point / "exports/model.safetensors").is_file() for point in "01"] == [True, True]
    assert [len(list((sweep / point).glob("evaluation-*.json"))) for point in "01"] == [1, 1]
    assert {name: of for name, (of, _) in states(tmp_path / "evaluated").items()} == {"0": "finished", "1": "finished"}


def test_the_alert_of_a_failed_point_has_its_reason_and_what_follows_is_cancelled(tmp_path: Path) -> None:
    sweep, alerts = tmp_path / "s", tmp_path / "alerts"
    on_end = f'hydra.launcher.on_end="echo \\"$CLIPX_STATE|$CLIPX_REASON|$CLIPX_FOLDER\\" >> {alerts}"'
    faulty = ("--config-dir", str(PLUGINS / "faults"), "objective=faulty", "objective.rank=0")
    options = (*SLURM, *faulty, *QUICK, f"hydra.sweep.dir={sweep}", on_end, "hydra.launcher.then=[evaluate]")
    done = launch(*options, "hydra.launcher.wait=true", check=False)
    assert done.returncode == 1
    expected = f"failed|RuntimeError: a bug of rank 0|{sweep}/0\n"
    wait_until(lambda: alerts.exists() and alerts.read_text() == expected, "no alert")  # written after the result
    assert "point 0/evaluate  stopped: not started: point 0 has not finished" in done.stdout
    assert states(sweep)["0/evaluate"] == ("cancelled", "not started: point 0 has not finished")
