"""Data faults during a run: a killed loader worker, a full /dev/shm."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from helpers.processes import children_of
from helpers.runs import SMALL, VIT, run, start
from helpers.waiting import wait_until

from clipx.config.typed import last_of_each


def test_a_killed_loader_worker_ends_the_run_with_an_error_that_names_its_pid(tmp_path: Path) -> None:
    options = (*SMALL, *VIT, "data.samples=512", "data.workers=2", "duration=10000st", "checkpoint=none")
    run = start(tmp_path / "out", "-m", "clipx.train", *options, f"run_dir={tmp_path}/run")
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"  # exists before the workers do; a logged step has read from them

        def is_training() -> bool:
            assert run.poll() is None, run.err.read_text()
            return metrics.is_file() and metrics.stat().st_size > 0

        wait_until(is_training)
        worker, _ = children_of(run.pid)
        os.kill(worker, signal.SIGKILL)
        assert run.wait(600) == 1
    finally:
        run.kill()
        run.wait()
    (line,) = [line for line in run.err.read_text().splitlines() if line.startswith("error")]
    assert line.startswith(f"error: a loader process of this rank died (pid {worker}, by SIGKILL)")


@pytest.mark.slow
def test_full_shared_memory_raises_an_error_that_names_the_fix(tmp_path: Path) -> None:
    """Simulates a container with little /dev/shm by a mount namespace."""
    words = last_of_each([*SMALL, "data.batch_size=128", "data.workers=1", f"run_dir={tmp_path}/run"])
    train = shlex.join([sys.executable, "-m", "clipx.train", *words])
    command = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {train}"
    alone = ("--mount",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--mount")
    done = run("unshare", *alone, "sh", "-c", command, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "0.9 MB of shared memory for samples" in line
    assert "No space left on device" in line and "docker's --shm-size" in line
