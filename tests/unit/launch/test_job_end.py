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
    "sleep": "",
}


class Job:
    """A point whose job's script runs in bash. `srun` is shell code that runs instead of the ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "point"
        self.files = self.folder / ".launch"
        (self.files / "logs").mkdir(parents=True)
        self.point = Point(folder=self.folder, index=0, overrides=[], content="x", job="7")
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, code in COMMANDS.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{code}\n")
            (self.bin / name).chmod(0o755)
        self.calls_file = folder / "calls"

    def run(self, srun: str, restart: int = 0) -> subprocess.CompletedProcess[str]:
        text = sbatch_script(SlurmSpec(), self.folder.parent, [self.folder], snapshot.environment(None))
        self.calls_file.unlink(missing_ok=True)
        env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": f"{restart}",
            "SRUN": srun,
            "CALLS": str(self.calls_file),
            "JOB": "JobState=RUNNING PreemptTime=None",
            "files": str(self.files),
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
    line = "requeue 5 of at most 20: a signal stopped the run, which has saved; newest checkpoint: step-00000012"
    assert done.stdout == f"{line}\n"
    assert (job.files / "logs/7.0.log").read_text() == f"{line}\n"
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
        "takes longer than hydra.launcher.time less hydra.launcher.signal_before_s, raise the time",
    }
    assert [event["event"] for event in job.events] == ["requeued"] * 3 + ["requeue_stopped"]
    assert "not requeued: 3 requeues without a newer checkpoint" in (job.files / "logs/7.0.log").read_text()


def test_a_requeued_point_resumes_and_a_run_without_checkpoints_requests_no_requeue(tmp_path: Path) -> None:
    points = [planned.point for planned in make_sweep(tmp_path, ["checkpoint=none"], ["checkpoint=local"]).planned]
    assert [worker._spec(replace(points[1], requeues=number)).resume for number in (0, 1)] == ["none", "auto"]
    for point in points:
        worker._request_requeue(point.launch_dir)
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
