"""Helpers of the launchers' tests: the command, and the state of jobs in SLURM and in the points' files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from clipx.commands import implementation
from clipx.config.typed import last_of_each
from clipx_launch.point import Point
from helpers import PLUGINS, forks
from helpers.runs import SMALL
from helpers.waiting import wait_until

TRAIN = (sys.executable, "-m", "clipx.train")
SLURM = ("-m", "hydra/launcher=clipx_slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1")
LOCAL = ("-m", "hydra/launcher=clipx_local")
QUICK = (*SMALL, "checkpoint=none")


def launch(
    *arguments: str, check: bool = True, command: str = TRAIN[2], **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m clipx.train`, or another command, with these arguments. Points run on one thread each."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = forks.run([{}], ["-m", command, *arguments], own, timeout=600)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, command: str = TRAIN[2]
) -> str:
    """Returns what a command that must end with exit code 2 prints to stderr, from this process."""
    monkeypatch.setattr("sys.argv", last_of_each([command, *arguments]))
    with pytest.raises(SystemExit) as ended:
        import_module(implementation(command)).main()
    errors = capsys.readouterr().err
    assert ended.value.code == 2, errors
    return errors


def held(sweep: Path) -> tuple[str, ...]:
    """Returns options with which each process of a run makes 5 steps, and more only after a signal or `release`.

    So a test interrupts the run at a step that it knows, however long its own commands take.
    """
    return ("--config-dir", str(PLUGINS / "faults"), "objective=held", f"objective.until={_released(sweep)}")


def release(sweep: Path) -> None:
    _released(sweep).touch()


def _released(sweep: Path) -> Path:
    return sweep.with_name(f"{sweep.name}-released")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout.strip()


def job_of(output: str) -> str:
    (job,) = re.findall(r"^  job     (\d+)$", output, re.M)
    return str(job)


def slurm_tasks(job: str) -> list[dict[str, str]]:
    """Returns what scontrol reports of a job, one dictionary per task."""
    lines = output_of("scontrol", "--oneliner", "show", "job", job).splitlines()
    return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]


def wait_for_job(job: str) -> list[str]:
    """Waits for a job. Returns the final states of its tasks."""

    def states() -> list[str] | None:
        found = [task["JobState"] for task in slurm_tasks(job)]
        return None if {"PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"} & set(found) else found

    return wait_until(states, f"job {job} does not end")


def wait_for_steps(point: Path, steps: int = 2) -> None:
    """Waits until a point has logged this number of steps."""
    wait_until(lambda: len(rows(point)) >= steps, lambda: f"{point} does not train: {logs(point)}")


def wait_for_signal(point: Path) -> None:
    """Waits until a run has received a signal: scancel returns before SLURM delivers it."""
    wait_until(lambda: "stopping after this step" in logs(point), lambda: f"{point} has no signal: {logs(point)}")


def rows(point: Path) -> list[dict[str, float]]:
    path = point / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def losses(point: Path) -> list[float]:
    return [row["train/loss"] for row in rows(point) if "train/loss" in row]


def launch_json(point: Path, name: str) -> Any:
    """Returns a JSON file of a launcher. `result` is that of the job that point.json names."""
    files = point / ".launch"
    if name == "result":
        found = Point.read(point)
        assert found is not None
        files = found.files
    return json.loads((files / f"{name}.json").read_text())


def sweep_jobs(sweep: Path) -> list[str]:
    """Returns the newest job of each point in a sweep's folder, in the order of the points' numbers."""
    points = [json.loads(path.read_text()) for path in sweep.glob("**/.launch/point.json")]
    return [point["job"] for point in sorted(points, key=lambda point: int(point["index"]))]


def logs(point: Path) -> str:
    return "".join(f"{path.name}: {path.read_text()}" for path in sorted((point / ".launch" / "logs").glob("*")))
