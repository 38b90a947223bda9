"""End of a job's script: requeueing, retries and the reason of a failure. SLURM's commands are shell scripts here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.slurm_jobs import launch_json
from helpers.sweeps import make_sweep

from clipx_launch import snapshot, worker
from clipx_launch.point import Point, Result
from clipx_launch.sbatch_script import sbatch_script
from clipx_launch.slurm_spec import SlurmSpec

KILLED = "srun: error: n2: task 1: Killed"
EXITED = "srun: error: n1: task 0: Exited with exit code 1"
LOST = Result("failed", 1, error="rank 1 (host n2, pid 5) sent no heartbeat for 4 s, since step 3: it was killed")
# scontrol logs its arguments. `scontrol show job` prints $JOB.
COMMANDS = {
    "srun": 'eval "$SRUN"',
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; [[ "$*" != *"show job"* ]] || echo "$JOB"',
    "scancel": 'echo "scancel $*" >> "$CALLS"',
    "sleep": "",
}


class Job:
    """A point whose job's script runs in bash. `srun` is shell code that runs instead of the ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "point"
        self.point = Point(folder=self.folder, index=0, overrides=[], content="x", job="7")
        self.files = self.point.files
        self.point.logs.mkdir(parents=True)
        self.point.write()
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, code in COMMANDS.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{code}\n")
            (self.bin / name).chmod(0o755)
        self.calls_file = folder / "calls"

    def run(
        self,
        srun: str,
        restart: int = 0,
        preempted: bool = False,
        job: str = "7",
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        text = sbatch_script(SlurmSpec(**options), self.folder.parent, {0: self.folder}, snapshot.environment(None))
        self.calls_file.unlink(missing_ok=True)
        env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "SLURM_JOB_ID": job,
            "SLURM_RESTART_COUNT": f"{restart}",
            "SRUN": srun,
            "CALLS": str(self.calls_file),
            "JOB": f"JobState=RUNNING PreemptTime={'2026-11-30T12:00:00' if preempted else 'None'}",
            "files": str(self.files),
            **(variables or {}),
        }
        return subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, timeout=600, check=False)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.calls

    @property
    def result(self) -> Result | None:
        return self.point.result

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def save_checkpoint(self, step: int) -> None:
        folder = self.folder / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "MANIFEST.json").touch()

    def stop(self, how: str = "SIGUSR1 before training began") -> str:
        """Returns the code of ranks that a signal stops."""
        return f'echo -n "{how}" > "$files/requeue"'

    def fail(self, name: str, result: Result) -> str:
        """Returns the code of a rank that writes a result."""
        values = {"state": result.state, "exit_code": result.exit_code, "value": None, "error": result.error}
        return f"echo '{json.dumps(values)}' > \"$files/{name}.json\""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_stopped_run_is_requeued_with_a_line_in_both_logs_and_an_event(job: Job) -> None:
    job.save_checkpoint(12)
    done = job.run(job.stop("saved"), restart=4)
    line = "requeue 1 of at most 20: a signal stopped the run, which has saved; newest checkpoint: step-00000012"
    assert done.stdout == f"{line}\n"
    assert (job.point.logs / "7.0.log").read_text() == f"{line}\n"
    (event,) = job.events
    assert (event["event"], event["message"], event["job"]) == ("requeued", line, "7")
    assert job.requeued
    assert job.result is not None and job.result.state == "stopped"


def test_three_requeues_without_a_newer_checkpoint_fail_the_job(job: Job) -> None:
    for restart in range(3):
        job.run(job.stop(), restart)
        assert job.requeued
    done = job.run(job.stop(), 3)
    assert not job.requeued
    assert done.returncode == 1
    assert launch_json(job.folder, "result") == {
        "state": "failed",
        "exit_code": 1,
        "error": "requeued 3 times without a newer checkpoint (newest: none; SIGUSR1 before training began): if starting "
        "takes longer than hydra.launcher.timeout_min less hydra.launcher.signal_delay_s, raise the time limit",
    }
    assert [event["event"] for event in job.events] == ["requeued"] * 3 + ["requeue_stopped"]
    assert "not requeued: 3 requeues without a newer checkpoint" in (job.point.logs / "7.0.log").read_text()


def test_preemptions_are_no_stalls_and_have_a_budget_of_their_own(job: Job) -> None:
    """SLURM preempts the job while it starts, again and again, and between that its time ends twice."""
    for restart in range(6):
        job.run(job.stop(), restart, preempted=restart not in (1, 3), max_num_timeout=2, max_preemption=4)
        assert job.requeued, restart
    assert [line.split()[0] for line in (job.files / "requeues").read_text().splitlines()] == [
        "preemption", "limit", "preemption", "limit", "preemption", "preemption",
    ]  # fmt: skip
    assert job.events[4]["message"].startswith("preemption 3 of at most 4, requeued: SIGUSR1 before training began; ")
    for preempted, key in ((True, "max_preemption=4"), (False, "max_num_timeout=2")):
        done = job.run(job.stop("saved"), 6, preempted, max_num_timeout=2, max_preemption=4)
        assert not job.requeued
        assert f"stopped and saved, but not requeued (hydra.launcher.{key})" in done.stderr
        assert job.result is not None and job.result.state == "stopped"
    job.run(job.stop(), 6, preempted=True)
    assert job.requeued, "preemptions are limited without a limit"


OOM = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("reported", "cause"),
    [("", "n2: task 1: Out Of Memory"), ("DataLoader worker (pid 9) is killed", "DataLoader worker (pid 9) is killed")],
    ids=["the rank", "its loader"],
)
def test_out_of_memory_is_named_and_excludes_no_node(job: Job, reported: str, cause: str) -> None:
    rank = f"{job.fail('result', Result('failed', 1, error=reported))}; " if reported else ""
    srun = f"{rank}echo '{OOM}' >&2; echo 'srun: error: n2: task 1: Out Of Memory' >&2; exit 137"
    job.run(srun, mem_gb=12.5)
    error = f"out of memory ({cause}): raise hydra.launcher.mem_gb=12.5, or lower data.workers"
    assert job.result == Result("failed", 137, error=error)
    assert not job.requeued
    job.run(srun, mem_gb=12.5, max_retry=1)
    assert job.requeued
    assert not any("ExcNodeList" in call for call in job.calls)
    assert job.events[-1]["message"] == f"retry 1 of at most 1: {error}"


def test_an_srun_that_cannot_start_is_repeated(job: Job) -> None:
    reason = "Unable to confirm allocation for job 7: Unable to contact slurm controller (connect failure)"
    away = f'echo "srun: error: {reason}" >&2; exit 1'
    job.run(f'if [[ ! -e "$files/tried" ]]; then touch "$files/tried"; {away}; fi; {job.stop("saved")}')
    assert job.requeued
    done = job.run(away)
    assert done.stderr.count("srun could not start the run: try ") == 10
    assert done.returncode == 1
    assert job.result == Result("failed", 1, error=f"srun could not start the run: {reason}")


def test_a_job_without_a_variable_that_it_needs_does_not_start(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESENT_TOKEN", "x")
    done = job.run('touch "$files/started"', pass_environment=["PRESENT_TOKEN", "ABSENT_TOKEN"])
    assert done.returncode == 2
    error = "hydra.launcher.pass_environment: ABSENT_TOKEN not in the environment of the job: export it before sbatch"
    assert job.result == Result("failed", 2, error=error)
    assert not (job.files / "started").exists()


def test_a_second_job_of_a_point_leaves_the_files_of_the_first(job: Job) -> None:
    """The first one runs, and one of its ranks has written."""
    job.files.mkdir()
    names = ("requeue", "lost.json", "srun.log", "requeues")
    for name in names:
        (job.files / name).write_text("of the first")
    job.point.write_result(Result("finished", value=0.5))
    in_use = Result("failed", 3, error="in use by pid 5 on n1, SLURM job 7")
    done = job.run(f"{job.fail('result', in_use)}; exit 3", job="8")
    assert done.returncode == 3
    assert job.result == Result("finished", value=0.5)
    assert {(job.files / name).read_text() for name in names} == {"of the first"}
    assert replace(job.point, job="8").result == in_use


def test_a_requeued_point_resumes_and_a_run_without_checkpoints_requests_no_requeue(tmp_path: Path) -> None:
    points = [planned.point for planned in make_sweep(tmp_path, ["checkpoint=none"], ["checkpoint=local"]).planned]
    assert [worker._spec(replace(points[1], requeues=number)).resume for number in (0, 1)] == ["none", "auto"]
    points[0].folder.joinpath("metrics.jsonl").write_text("{}")
    points[0].folder.joinpath("config.yaml").touch()
    assert worker._spec(points[0]).resume == "auto", "a second start of the same script does not resume"
    for point in points:
        worker._request_requeue(point.folder, point.launch_dir)
    assert [(point.launch_dir / "requeue").exists() for point in points] == [False, True]


@pytest.mark.parametrize(
    ("srun", "error"),
    [
        (lambda job: f"echo '{KILLED}' >&2; exit 137", "n2: task 1: Killed"),
        (lambda job: f"{job.fail('lost', LOST)}; echo '{KILLED}' >&2; exit 137", "n2: task 1: Killed"),
        (lambda job: f"{job.fail('lost', LOST)}; echo '{EXITED}' >&2; exit 1", LOST.error),
        (lambda job: f"{job.fail('result', Result('failed', 70, error='no progress'))}; echo '{KILLED}' >&2; exit 137", "no progress"),
        (lambda job: f"{job.fail('result', Result('failed', 1, error='a bug'))}; {job.fail('lost', LOST)}; exit 1", "a bug"),
    ],
)  # fmt: skip
def test_a_failed_job_has_the_reason_in_its_result(job: Job, srun: Callable[[Job], str], error: str) -> None:
    done = job.run(srun(job))
    assert job.result is not None
    assert (job.result.state, job.result.error) == ("failed", error)
    assert done.returncode == job.result.exit_code != 0
    assert not job.requeued


def test_a_task_of_an_array_is_named_as_a_task_to_slurm(job: Job) -> None:
    """SLURM gives the last task the number of the whole array, which such commands would reach."""
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    job.point.set_job("7_0")
    job.files = job.point.files
    own = {**task, "files": str(job.files)}
    job.run(job.stop("saved"), variables=own)
    calls = job.calls
    job.run(job.fail("result", Result("stopped", 75)) + '; touch "$files/cancel"', variables=own)
    calls += job.calls
    assert {"scontrol requeue 7_0", "scancel 7_0"} <= {*calls}
    assert [call for call in calls if "7_0" not in call] == []


def test_on_end_runs_at_the_end_of_a_point_and_not_when_it_is_requeued(job: Job, tmp_path: Path) -> None:
    alerts = tmp_path / "alerts"
    command = f'echo "$CLIPX_STATE|$CLIPX_REASON|$CLIPX_FOLDER" >> {alerts}'
    job.run(job.stop("saved"), on_end=command)
    assert job.requeued and not alerts.exists()
    job.run(job.fail("result", Result("failed", 1, error="a bug")) + "; exit 1", on_end=command)
    job.run(job.fail("result", Result("finished")), on_end=command)
    job.run(job.stop("saved"), on_end=command, max_num_timeout=0)
    folder = job.folder
    assert alerts.read_text().splitlines() == [
        f"failed|a bug|{folder}", f"finished||{folder}", f"stopped|a signal stopped the run, which has saved|{folder}",
    ]  # fmt: skip


def test_a_command_on_end_that_fails_changes_no_result(job: Job) -> None:
    done = job.run(job.fail("result", Result("finished")), on_end="exit 3")
    assert (done.returncode, job.result) == (0, Result("finished"))
    assert "hydra.launcher.on_end has failed (exit code 3)" in done.stderr
