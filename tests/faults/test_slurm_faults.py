"""Runs interrupted by SLURM: preemption, time limits, requeueing, failed nodes.

Some tests need clusters of other kinds than CLIPX_TEST_SLURM's, and start and stop them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import slurm_cluster
from helpers.runs import SMALL, VIT, small, tensors
from helpers.slurm_cluster import Kind, Unavailable
from helpers.slurm_jobs import (
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
from helpers.sweeps import make_sweep, states
from helpers.waiting import wait_until

from clipx.trainer.trainer import Trainer
from clipx_launch import cluster
from clipx_launch import slurm as launcher
from clipx_launch.__main__ import main
from clipx_launch.slurm_spec import SlurmSpec

pytestmark = pytest.mark.slow
STEPS = 40
RUN = (*SMALL, *VIT, "data.workers=1", f"duration={STEPS}st", "checkpoint.every=end")


@contextmanager
def started(kind: Kind) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has at most 107 characters
    try:
        yield slurm_cluster.start(folder, kind)
    except Unavailable as error:
        without = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        without(f"no SLURM of kind {kind}: {error}")
    finally:
        slurm_cluster.stop(folder)


@pytest.fixture(scope="module")
def accounted_conf(slurm_conf: Path) -> Iterator[Path]:
    with started(Kind.accounted) as conf:
        yield conf


@pytest.fixture
def accounted(accounted_conf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(accounted_conf))
    return accounted_conf


@pytest.fixture
def alone(slurm_conf: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of one test. On CLIPX_TEST_SLURM's, another test's job on whole nodes preempts the run a second time."""
    with started(Kind.plain) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the run directory of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    Trainer(small(folder, *RUN)).fit()
    return folder


def submitted(sweep: Path, *options: str) -> str:
    return job_of(launch(*SLURM, *RUN, *held(sweep), f"hydra.sweep.dir={sweep}", *options).stdout)


def restarts_of_identical_run(uninterrupted: Path, sweep: Path, job: str) -> int:
    """Asserts that the job's result equals the uninterrupted run bit for bit, with each step logged once.

    Releases the run. Returns the number of restarts.
    """
    point = sweep / "0"
    release(sweep)
    assert wait_for_job(job) == ["COMPLETED"], logs(point)
    assert launch_json(point, "result")["state"] == "finished"
    restarts = int(launch_json(point, "point")["requeues"])
    assert slurm_tasks(job)[0]["Restarts"] == str(restarts)
    ours, theirs = tensors(point, STEPS), tensors(uninterrupted, STEPS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [row["step"] for row in rows(point)] == list(range(1, STEPS + 1))
    assert losses(point) == losses(uninterrupted)
    return restarts


def check_preemption(uninterrupted: Path, sweep: Path, signal: str) -> None:
    job = submitted(sweep, "hydra.launcher.partition=low")
    wait_for_steps(sweep / "0")
    # A batch job: a signal to srun is lost while it starts its step.
    options = ("--partition=main", f"--nodes={len(slurm_cluster.NODES)}", "--exclusive", "--output=/dev/null")
    other = output_of("sbatch", "--parsable", *options, "--wrap=sleep infinity")
    shown = []

    def is_requeued() -> bool:
        shown.append(states(sweep)["0"][0])
        return shown[-1] == "requeued"

    try:
        wait_until(is_requeued, lambda: f"not preempted: {logs(sweep / '0')}")
    finally:
        output_of("scancel", other)
    assert set(shown) <= {"running", "requeued"}, "a requeue under way was shown as an end"
    assert restarts_of_identical_run(uninterrupted, sweep, job) == 1
    assert f"{signal}: stopped after step" in logs(sweep / "0")


@pytest.mark.usefixtures("alone")
def test_commands_follow_each_run_of_a_sweep_that_is_preempted(tmp_path: Path) -> None:
    """Train, evaluate, export: a requeued run has not finished, so that what follows it waits for its second end."""
    sweep, alerts = tmp_path / "s", tmp_path / "alerts"
    on_end = f'hydra.launcher.on_end="echo \\"$CLIPX_STATE $CLIPX_FOLDER\\" >> {alerts}"'
    then = 'hydra.launcher.then=[evaluate, "export format=safetensors"]'
    options = ("hydra.launcher.partition=low", "evaluator=[retrieval]", "seed=0,1", on_end, then)
    submitted_jobs = launch(*SLURM, *RUN, *held(sweep), f"hydra.sweep.dir={sweep}", *options).stdout
    assert f"{sweep}: 6 of 6 points submitted" in submitted_jobs
    for point in "01":
        wait_for_steps(sweep / point)
    assert {name: of for name, (of, _) in states(sweep).items() if "/" in name} == dict.fromkeys(
        ("0/evaluate", "0/export", "1/evaluate", "1/export"), "waiting"
    )
    assert states(sweep)["1/export"] == ("waiting", "after 1/evaluate")
    waiting = ("--partition=main", f"--nodes={len(slurm_cluster.NODES)}", "--exclusive", "--output=/dev/null")
    other = output_of("sbatch", "--parsable", *waiting, "--wrap=sleep infinity")
    try:
        wait_until(lambda: [states(sweep)[point][0] for point in "01"] == ["requeued"] * 2, "not preempted")
        assert states(sweep)["0/evaluate"] == ("waiting", "after 0")
        assert not alerts.exists(), alerts.read_text()
    finally:
        output_of("scancel", other)
    release(sweep)
    wait_until(lambda: {of for of, _ in states(sweep).values()} == {"finished"}, lambda: str(states(sweep)))
    assert [launch_json(sweep / point, "point")["requeues"] for point in "01"] == [1, 1]
    for point in "01":
        assert len(losses(sweep / point)) == STEPS, "a step was logged twice or not at all"
        assert (sweep / point / "exports/model.safetensors").is_file()
        assert len(list((sweep / point).glob("evaluation-*.json"))) == 1
    expected = sorted(f"finished {sweep}/{k}{name}" for k in "01" for name in ("", "/evaluate", "/export"))
    wait_until(
        lambda: sorted(alerts.read_text().splitlines()) == expected, alerts.read_text
    )  # written after the results


@pytest.mark.usefixtures("alone")
def test_a_preempted_run_saves_at_sigterm_and_resumes_when_resources_are_free(
    tmp_path: Path, uninterrupted: Path
) -> None:
    """SLURM would count a job that ends within the GraceTime as failed."""
    check_preemption(uninterrupted, tmp_path, "SIGTERM")


@pytest.mark.usefixtures("alone")
def test_a_run_preempted_with_preemptmode_cancel_is_requeued_by_its_script(tmp_path: Path, uninterrupted: Path) -> None:
    """SLURM has cancelled the job when the script requeues it, because there is no GraceTime."""
    output_of("scontrol", "update", "partitionname=low", "PreemptMode=CANCEL", "GraceTime=0")
    check_preemption(uninterrupted, tmp_path, "SIGTERM")


@pytest.mark.usefixtures("alone")
def test_a_run_preempted_three_times_while_it_starts_is_no_stall(tmp_path: Path) -> None:
    """It waits in its setup, and is cancelled there without a GraceTime."""
    output_of("scontrol", "update", "partitionname=low", "PreemptMode=CANCEL", "GraceTime=0")
    wait = "(( SLURM_RESTART_COUNT > 2 )) || { touch $files/waits$SLURM_RESTART_COUNT; sleep 3600 & wait $!; }"
    options = (*SLURM, *SMALL, "checkpoint=none", f"hydra.launcher.setup=['{wait}']", "hydra.launcher.partition=low")
    job = job_of(launch(*options, f"run_dir={tmp_path}/run").stdout)
    for number in range(3):
        wait_until((tmp_path / f"run/.launch/{job}/waits{number or ''}").exists)
        other = output_of("sbatch", "--parsable", "--partition=main", f"--nodes={len(slurm_cluster.NODES)}",
                          "--exclusive", "--output=/dev/null", "--wrap=sleep infinity")  # fmt: skip
        wait_until(lambda n=number: slurm_tasks(job)[0]["Restarts"] == str(n + 1), "the job is not requeued")  # type: ignore[misc]
        output_of("scancel", other)
    assert wait_for_job(job) == ["COMPLETED"], logs(tmp_path / "run")
    assert (tmp_path / f"run/.launch/{job}/requeues").read_text() == "preemption none\n" * 3


@pytest.mark.usefixtures("accounted")
def test_a_preempted_run_saves_at_the_signal_option_when_it_arrives_first(tmp_path: Path, uninterrupted: Path) -> None:
    check_preemption(uninterrupted, tmp_path, "SIGUSR2")


def test_a_killed_rank_is_named_in_the_result_and_retried_on_another_node(slurm: Path, tmp_path: Path) -> None:
    """SLURM's answer arrives after its signal, as on a busy machine."""
    point, late = tmp_path / "0", tmp_path / "bin/scontrol"
    late.parent.mkdir()
    late.write_text(f'#!/bin/bash\n{shutil.which("scontrol")} "$@"\ncode=$?\nsleep 1\nexit $code\n')
    late.chmod(0o755)
    options = ("hydra.launcher.tasks_per_node=2", "hydra.launcher.max_retry=1", "checkpoint.every=2st")
    job = submitted(tmp_path, *options, f"hydra.launcher.setup=['PATH={late.parent}:$PATH']")

    def kill() -> str:
        node = slurm_tasks(job)[0]["NodeList"]
        os.kill(int(json.loads((point / "run.lock").read_text())["pid"]), signal.SIGKILL)
        return node

    wait_until((point / "checkpoints/step-00000004").is_dir)
    nodes = [kill()]
    wait_until(lambda: slurm_tasks(job)[0]["Restarts"] == "1", "the job is not retried")
    wait_for_steps(point, 6)  # the first attempt is held after step 5, and the second resumes at 4
    nodes.append(kill())
    assert wait_for_job(job) == ["FAILED"]
    assert len(set(nodes)) == 2
    assert states(tmp_path)["0"] == ("failed", f"{nodes[1]}: task 0: Killed")
    assert launch_json(point, "result")["exit_code"] == 137
    retried = [json.loads(line) for line in (point / "events.jsonl").read_text().splitlines() if "retried" in line]
    message = f"retry 1 of at most 1, without {nodes[0]}: {nodes[0]}: task 0: Killed"
    assert [event["message"] for event in retried] == [message]


def test_a_run_longer_than_its_time_limit_matches_an_uninterrupted_run(
    slurm: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    """The limit is lowered once the run trains, and raised for the second attempt: a slow start changes nothing.

    SLURM checks every 30 s and sends the signal up to 30 s early: here within 60 s, and at least 90 s before the limit.
    """
    job = submitted(tmp_path, "hydra.launcher.timeout_min=60", "hydra.launcher.signal_delay_s=120")
    assert slurm_tasks(job)[0]["TimeLimit"] == "01:00:00"
    wait_for_steps(tmp_path / "0")
    hours, minutes, _ = map(int, slurm_tasks(job)[0]["RunTime"].split(":"))
    set_limit = ("scontrol", "update", f"jobid={job}")
    output_of(*set_limit, f"timelimit={60 * hours + minutes + 3}")
    wait_until(lambda: slurm_tasks(job)[0]["Restarts"] == "1", "the job is not requeued")
    output_of(*set_limit, "timelimit=60")
    assert restarts_of_identical_run(uninterrupted, tmp_path, job) >= 1
    assert "SIGUSR2: stopped after step" in logs(tmp_path / "0")


def test_a_run_on_a_failed_node_resumes_on_another_from_its_last_checkpoint(
    accounted: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    job = submitted(tmp_path, "checkpoint.every=2st", "checkpoint.keep_last=9")
    wait_for_steps(tmp_path / "0", 5)
    wait_until((tmp_path / "0/checkpoints/step-00000004").is_dir)
    node = slurm_tasks(job)[0]["NodeList"]
    slurm_cluster.crash(accounted.parent, node)
    output_of(
        "scontrol", "update", f"nodename={node}", "state=down", "reason=test"
    )  # SLURM does the same after SlurmdTimeout
    try:
        assert restarts_of_identical_run(uninterrupted, tmp_path, job) == 1
        assert slurm_tasks(job)[0]["NodeList"] != node
    finally:
        slurm_cluster.start(accounted.parent, Kind.accounted)
    assert "resumed  at step 4," in logs(tmp_path / "0")


@pytest.mark.usefixtures("accounted")
def test_the_usage_of_a_requeued_run_equals_the_sums_of_sacct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = slurm_cluster.GPUS
    # The devices are not real: the run trains on the CPU, for which the launcher refuses to ask for GPUs.
    monkeypatch.setenv("SBATCH_GRES", f"gpu:{gpus}")
    job = submitted(tmp_path, "distributed.device=cpu", "checkpoint.every=2st")
    wait_for_steps(tmp_path / "0", 5)
    wait_until((tmp_path / "0/checkpoints/step-00000004").is_dir)
    output_of("scontrol", "requeue", job)
    wait_until(lambda: slurm_tasks(job)[0]["Restarts"] == "1", "the job is not requeued")
    release(tmp_path)
    assert wait_for_job(job) == ["COMPLETED"], logs(tmp_path / "0")
    query = ("sacct", "-n", "-P", "-X", "--duplicates", "--format=State,ElapsedRaw,AllocTRES", f"--jobs={job}")

    def starts() -> dict[str, tuple[int, str]]:
        lines = [line.split("|") for line in output_of(*query).splitlines()]
        return {state: (int(seconds), tres) for state, seconds, tres in lines}

    wait_until(lambda: starts().keys() == {"REQUEUED", "COMPLETED"}, lambda: str(starts()))
    assert all(f"gres/gpu={gpus}" in tres.split(",") for _, tres in starts().values())
    assert main(["usage", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = {state: seconds for state, (seconds, _) in starts().items()}
    hours = sum(seconds.values()) / 3600
    for sums in (found["total"], *found["runs"]):
        assert (sums["starts"], sums["hours"], sums["gpu_hours"]) == (2, hours, pytest.approx(gpus * hours))
        assert 0 < sums["lost_gpu_hours"] < sums["gpu_hours"]
    assert {row["state"]: row["hours"] for row in found["states"]} == {s: n / 3600 for s, n in seconds.items()}


@pytest.mark.usefixtures("accounted")
def test_the_state_of_an_old_job_is_read_from_accounting(tmp_path: Path) -> None:
    spec = SlurmSpec(gpus_per_node="0", cpus_per_task=1, setup=["exit 3"], additional_parameters={"hold": True})
    launcher.launch(make_sweep(tmp_path, ["seed=0"], ["seed=1"], spec=spec), spec)
    (job,) = set(sweep_jobs(tmp_path))
    output_of("scontrol", "release", f"{job}_0")
    wait_until(lambda: f"{job}_0" not in cluster.queued_jobs(), "point 0 does not end")
    output_of("scancel", job)
    expected = {"0": ("failed", f"job {job}_0 is failed"), "1": ("cancelled", f"job {job}_1 is cancelled")}
    wait_until(lambda: states(tmp_path) == expected, lambda: str(states(tmp_path)))
    known = ("scontrol", "show", "job", job)
    wait_until(
        lambda: subprocess.run(known, capture_output=True, check=False).returncode, f"job {job} is not forgotten"
    )
    wait_until(lambda: states(tmp_path) == expected, lambda: str(states(tmp_path)))
    assert "999999" not in cluster.find_jobs({"999999"})
