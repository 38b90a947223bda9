"""Sweeps in local processes, through `hydra/launcher=clipx_local`."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import PLUGINS
from helpers.runs import SMALL, VIT, run
from helpers.slurm_jobs import (
    LOCAL,
    QUICK,
    SLURM,
    TRAIN,
    held,
    launch,
    launch_json,
    logs,
    losses,
    release,
    rows,
    wait_for_steps,
)

from clipx.config.typed import last_of_each

PLUGIN = PLUGINS / "faults"
LONG = (*LOCAL, *SMALL, *VIT, "duration=20st", "checkpoint.every=end")


@pytest.mark.slow
def test_parallel_points_get_separate_devices_and_fail_independently(tmp_path: Path) -> None:
    sweep = tmp_path / "s, 1"
    two = ("hydra.launcher.tasks=2", "hydra.launcher.parallelism=2", f"hydra.sweep.dir='{sweep}'")
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
    assert (
        f"{sweep}/0 already holds a run: continue it with resume=auto, or give this run another name=" in other.stderr
    )


def test_an_interrupted_sweep_saves_starts_no_points_and_resumes(tmp_path: Path) -> None:
    command = (*LONG, *held(tmp_path), "seed=0,1", f"hydra.sweep.dir={tmp_path}")
    with subprocess.Popen(
        last_of_each([*TRAIN, *command]), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as sweep:
        wait_for_steps(tmp_path / "0")
        sweep.send_signal(signal.SIGINT)
        _, errors = sweep.communicate(timeout=600)
    assert sweep.returncode == 75
    assert errors == (
        "stopped: SIGINT: 0 of 2 points are finished; run the same command "
        f"with hydra.sweep.dir={tmp_path} to continue\n"
    )  # fmt: skip
    assert launch_json(tmp_path / "0", "result")["state"] == "stopped"
    assert not (tmp_path / "1/metrics.jsonl").exists()
    release(tmp_path)
    launch(*LONG, *held(tmp_path), "seed=0", f"hydra.sweep.dir={tmp_path}")
    assert [row["step"] for row in rows(tmp_path / "0")] == list(range(1, 21)), "a step was logged twice or not at all"


def test_too_few_gpus_raise_a_one_line_error(tmp_path: Path) -> None:
    options = (*LOCAL, *QUICK, "hydra.launcher.parallelism=3", f"hydra.sweep.dir={tmp_path}")
    done = launch(*options, check=False, CUDA_VISIBLE_DEVICES="0,1")
    assert (done.returncode, done.stderr) == (
        2,
        "error: hydra.launcher.parallelism=3 x hydra.launcher.tasks=1 is more than the 2 visible GPUs: lower "
        "one of them, or use distributed=cpu\n",
    )


SWEEPER = """
import sys
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from clipx.train import main


class Best(Sweeper):
    '''What it tries next depends on the value before.'''

    def __init__(self, **_): ...

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        first, = self.launcher.launch([[*arguments, "seed=0"]], initial_job_idx=0)
        again, = self.launcher.launch([[*arguments, f"seed={1 + int(first.return_value > 2)}"]], initial_job_idx=1)
        print("values", [first.return_value, again.return_value])


sys.modules["hydra_plugins.best"] = sys.modules["__main__"]
Best.__module__ = "hydra_plugins.best"
Plugins.instance().register(Best)
ConfigStore.instance().store(group="hydra/sweeper", name="best", node={"_target_": "hydra_plugins.best.Best"})
main()
"""


def sweep_with(tmp_path: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    (tmp_path / "best.py").write_text(SWEEPER)
    return run(
        TRAIN[0],
        str(tmp_path / "best.py"),
        *options,
        "hydra/sweeper=best",
        f"hydra.sweep.dir={tmp_path}/s",
        check=check,
    )


@pytest.mark.slow
def test_a_sweeper_gets_the_values_of_the_points(tmp_path: Path) -> None:
    done = sweep_with(tmp_path, *LOCAL, *QUICK, "evaluator=[retrieval]")
    values = json.loads(done.stdout.rpartition("values ")[2])
    assert values == [launch_json(tmp_path / "s" / point, "result")["value"] for point in "01"]
    assert all(0 <= value <= 1 for value in values)
    assert len(launch_json(tmp_path / "s", "sweep")["points"]) == 2


def test_a_sweeper_that_needs_values_requires_wait_true(tmp_path: Path) -> None:
    done = sweep_with(tmp_path, *SLURM, *QUICK, check=False)
    assert done.returncode == 2
    assert (
        "error: hydra.launcher.wait=false returns no results, which Best needs: set hydra.launcher.wait=true"
        in done.stderr
    )


@pytest.mark.slow
def test_the_stock_local_launcher_works(tmp_path: Path) -> None:
    launch("-m", "hydra/launcher=submitit_local", *QUICK, f"hydra.sweep.dir={tmp_path}", "seed=0")
    assert len(losses(tmp_path / "0")) == 4
