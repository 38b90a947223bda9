"""Sweeps before they start, whose points are composed and checked, and the end of their points."""

from __future__ import annotations

import errno
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.slurm_jobs import refused
from helpers.sweeps import QUICK, make_sweep
from submitit.slurm.slurm import SlurmJob

from clipx.checkpoint.manager import run_url
from clipx.errors import ConfigError, Locked
from clipx_launch import cluster, progress, slurm, sweep
from clipx_launch.__main__ import main
from clipx_launch.cluster import Job
from clipx_launch.options import LocalSpec
from clipx_launch.point import Result
from clipx_launch.progress import ProgressDisplay
from clipx_launch.slurm_spec import SlurmSpec
from clipx_launch.sweep import Sweep


def test_a_point_is_finished_only_with_the_same_configuration(tmp_path: Path) -> None:
    (before,) = make_sweep(tmp_path, ["seed=0"]).planned
    before.point.write_result(Result("finished", value=0.5))
    same, other = (
        sweep._plan(replace(before.spec, seed=seed), before.point.folder, [f"seed={seed}"], 0) for seed in (0, 1)
    )
    same.find_previous()
    other.find_previous()
    assert (same.finished, same.spec.resume) == (True, "auto")
    assert (other.finished, other.other, other.spec.resume) == (False, before.point, "none")


def test_a_job_without_a_result_has_failed_at_the_second_poll_after_its_end(tmp_path: Path) -> None:
    """A shared file system may deliver the result later than SLURM the job's end."""
    made = make_sweep(tmp_path, ["seed=0"], ["seed=1"])
    late, lost = (planned.point for planned in made.planned)
    board, over = ProgressDisplay(made), set[str]()
    for number, point in enumerate((late, lost)):
        point.record_job("7", number)
        assert not progress._ended(point, {str(point.job_id): Job("COMPLETED")}, over, board)
    late.write_result(Result("finished", value=0.5))
    assert progress._ended(late, {"7_0": Job("COMPLETED")}, over, board)
    assert late.result == Result("finished", value=0.5)
    assert progress._ended(lost, {"7_1": Job("NODE_FAIL")}, over, board)
    assert lost.result == Result("failed", 1, error="job 7_1 is node fail")


def test_a_stopped_point_has_not_ended_while_its_job_is_requeued(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, ["seed=0"])
    point, board = made.planned[0].point, ProgressDisplay(made)
    point.record_job("7", None)
    point.write_result(Result("stopped", 75, error="SIGUSR1: stopped after step 3"))
    assert not progress._ended(point, {"7": Job("PENDING")}, set(), board)


def test_ranks_do_not_start_a_sweep_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = refused(monkeypatch, capsys, "-m", "seed=0,1", "data=csv", f"hydra.sweep.dir={tmp_path}/sweep")
    assert says.startswith("error (rank 1): -m on each of several ranks would start the sweep several times: ")
    assert not (tmp_path / "sweep").exists()


OWN = "# @package _global_\ndefaults:\n  - override /hydra/{group}: {choice}\nseed: {seed}\n"
LOCAL_KEY = "# @package _global_\nhydra:\n  {key}\nseed: {seed}\n"


@pytest.mark.parametrize(
    ("text", "master", "says"),
    [
        (OWN.format(group="launcher", choice="clipx_slurm", seed=5), [], "hydra/launcher=clipx_slurm"),
        (OWN.format(group="launcher", choice="clipx_slurm", seed=5), ["hydra/launcher=basic"], None),
        (OWN.format(group="launcher", choice="clipx_slurm", seed=5), ["hydra/launcher=clipx_slurm"], None),
        (OWN.format(group="sweeper", choice="clipx_optuna", seed=5), [], "hydra/sweeper=clipx_optuna"),
        (LOCAL_KEY.format(key="launcher: {parallelism: 2}", seed=5), [], "hydra.launcher.parallelism=2"),
        (LOCAL_KEY.format(key="sweep: {dir: elsewhere}", seed=5), [], "hydra.sweep.dir=elsewhere"),
        (LOCAL_KEY.format(key="sweeper: {max_batch_size: 2}", seed=5), [], "hydra.sweeper.max_batch_size=2"),
    ],
)  # fmt: skip
def test_an_option_that_is_swept_over_cannot_set_the_sweep(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    master: list[str],
    says: str | None,
) -> None:
    """Given on the command line, such a choice takes precedence over that of the option."""
    (tmp_path / "experiment").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"experiment/{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = ("--config-dir", ".", "-m", *master, "experiment=one,two", "data.batch_size=-1")
    error = refused(monkeypatch, capsys, *words)
    reason = " has no effect in an option that is swept over (experiment=one): give it on the command line"
    assert (f"{says}{reason}" in error) == (says is not None), error
    assert not Path("outputs").exists() or master == ["hydra/launcher=basic"]


def test_a_command_that_is_no_training_refuses_the_launcher_of_a_swept_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its points run in this process."""
    (tmp_path / "data").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"data/{name}.yaml").write_text(
            OWN.format(group="launcher", choice="clipx_slurm", seed=5).rpartition("seed")[0]
        )
    words = ("--config-dir", f"{tmp_path}", "-m", "run=nowhere", "data=one,two", f"hydra.sweep.dir={tmp_path}/sweep")
    error = refused(monkeypatch, capsys, *words, command="clipx.evaluate")
    assert "hydra/launcher=clipx_slurm has no effect in an option that is swept over (run=nowhere data=one)" in error


def test_an_experiment_chooses_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(OWN.format(group="launcher", choice="clipx_torchrun", seed=5))
    words = ("--config-dir", f"{tmp_path}", "-m", "experiment=mine", "data=digits", "seed=1,2")
    assert "hydra/launcher=clipx_torchrun prints the script of one run" in refused(monkeypatch, capsys, *words)
    assert "hydra/launcher=clipx_torchrun has no effect without -m" in refused(
        monkeypatch, capsys, *words[:2], words[3]
    )


def test_two_launches_of_a_sweep_exclude_each_other(tmp_path: Path) -> None:
    """The first one also holds a point outside of the sweep's folder."""
    made = make_sweep(tmp_path / "s", ["seed=0"])
    made.planned[0].point.folder = tmp_path / "run"
    with made.locked():
        with pytest.raises(Locked, match=rf"{tmp_path}/s/.launch is in use by pid \d+ .*: another command launches"):
            in_another_process(lambda: enter(replace(made)))
        elsewhere = replace(made, folder=tmp_path / "other")
        with pytest.raises(Locked, match=f"{tmp_path}/run/.launch is in use"):
            in_another_process(lambda: enter(elsewhere))
    assert not (tmp_path / "run").exists(), "a launch that started nothing left a folder"
    with replace(made).locked():
        pass


def test_a_point_of_another_sweep_that_waits_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = make_sweep(tmp_path, ["seed=0"]).planned
    second = sweep._plan(replace(first.spec, seed=1), first.point.folder, ["seed=1"], 0)
    again = Sweep(tmp_path, {0: ["seed=1"]}, planned=[second])
    monkeypatch.setattr(sweep, "has_slurm", lambda: True)
    monkeypatch.setattr(sweep, "queued_jobs", lambda: {"7_0": None})
    kept = first.point.launch_dir / "config.yaml"
    before = kept.read_bytes()
    for job, fix in ((None, f"or first delete {tmp_path}/0"), ("7", f"or first clipx-sweep cancel {tmp_path}/0")):
        first.point.job, first.point.task, first.point.sweep = job, 0 if job else None, str(tmp_path)
        first.point.write()
        with pytest.raises(ConfigError) as error:
            again.check(LocalSpec())
        assert "holds the waiting point of another sweep (" in str(error.value.args[1]) and fix in error.value.args[1]
        again.errors.clear()
    first.point.job = "8"  # it has left the queue without a run
    first.point.write()
    again.check(LocalSpec())
    assert again.pending == [second]
    assert kept.read_bytes() == before


def test_the_urls_of_new_points_are_checked_before_anything_is_started(tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/far"
    common = (*QUICK[:-1], "checkpoint=local", f"checkpoint.remote={remote}")
    made = make_sweep(tmp_path / "s", ["seed=0"], ["seed=1"], common=common)
    url = run_url(remote, made.planned[1].point.folder)
    assert url == f"{remote}{tmp_path}/s/1"
    there = Path(url.removeprefix("file://")) / "checkpoints/step-00000004"
    there.mkdir(parents=True)
    (there / "MANIFEST.json").touch()
    again = Sweep(tmp_path / "t", dict(made.overrides), planned=made.planned)
    for planned in again.planned:
        (planned.point.launch_dir / "point.json").unlink()
    with pytest.raises(ConfigError) as error:
        again.check(LocalSpec())
    assert len(error.value.args) == 2
    assert f"{url} already holds a run: continue it with resume=auto" in error.value.args[1]


def test_a_failure_after_the_submission_cancels_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the jobs are recorded."""
    made, cancelled = make_sweep(tmp_path, ["seed=0"], ["seed=1"], ["seed=2"], spec=SlurmSpec()), list[str]()
    numbers = iter("789")
    monkeypatch.setattr(cluster, "max_array_size", lambda: 2)
    monkeypatch.setattr(cluster, "run_slurm", lambda *words: cancelled.extend(words))
    monkeypatch.setattr(slurm, "_submit_array", lambda *_: SlurmJob(tmp_path, next(numbers)))
    monkeypatch.setattr(slurm, "_record_array", lambda points, job: full_disk() if job.job_id == "8" else None)
    with pytest.raises(OSError, match="No space"):
        slurm._submit(made, SlurmSpec())
    assert cancelled == ["scancel", "7", "8"]


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def in_another_process(call: Callable[[], None]) -> None:
    """Calls `call` in a fork, and raises what it raises there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        _calls.append(call)
        pool.submit(_call_last).result()


_calls: list[Callable[[], None]] = []


def _call_last() -> None:
    _calls[-1]()


def enter(made: Sweep) -> None:
    with made.locked():
        pass


NETWORK = {"interface": "ib0", "gloo_interface": None, "ib": None, "algo": None}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("network", NETWORK, "hydra.launcher.network.interface=ib0 of the sweep's launch has no effect in this version "
         "(NCCL, gloo and torch read environment variables, hydra.launcher.environment.NAME=…: NCCL_SOCKET_IFNAME "),
        ("style", "torchrun", "hydra.launcher.style=torchrun of the sweep's launch has no effect in this version (srun "
         "starts the ranks; clipx-sweep script torchrun prints a script): repeat the sweep's command with "),
        ("time", "24h", "hydra.launcher.time=24h of the sweep's launch has no effect in this version "
         "(hydra.launcher.timeout_min is the time limit in minutes: 1440 for 24h): repeat the sweep's command with "),
        ("network", dict.fromkeys(NETWORK), None), ("style", "srun", None),
    ],
)  # fmt: skip
def test_resume_refuses_a_launch_whose_removed_settings_had_an_effect(
    tmp_path: Path, key: str, value: object, says: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_sweep(tmp_path, ["seed=0"], spec=SlurmSpec())
    made.planned[0].point.write_result(Result("failed", 1, error="a bug"))
    file = tmp_path / ".launch/sweep.json"
    known = json.loads(file.read_text())
    known["launches"][0]["settings"][key] = value
    known["launches"][0]["cwd"] = str(tmp_path / "gone")
    file.write_text(json.dumps(known))
    assert main(["resume", str(tmp_path)]) > 0
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}" if says else f"error: {tmp_path}/gone, which the sweep was launched with")
    assert error.count("\n") == 1


def test_a_sweep_of_an_earlier_version_is_resumed_under_the_new_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_sweep(tmp_path, ["seed=0"], spec=SlurmSpec())
    made.planned[0].point.write_result(Result("failed", 1, error="a bug"))
    old = {
        "parallelism": 2, "srun": ["--a"], "sbatch": {"hold": True}, "signal_before_s": 60, "max_requeue": 3,
        "gpus_per_node": 0, "cpus_per_task": 4, "mem_gb": None, "setup": [],
    }  # fmt: skip
    launch = {"settings": {"kind": "slurm", **old}, "plugins": [], "cwd": str(tmp_path), "process": None}
    row = {"index": 0, "folder": str(tmp_path / "0"), "overrides": ["seed=0"], "job": "7", "task": None, "launch": 0}
    file = tmp_path / ".launch/sweep.json"
    file.write_text(json.dumps({"commands": [], "launches": [launch], "jobs": ["7"], "points": [row]}))
    launched: list[tuple[list[int], SlurmSpec]] = []
    monkeypatch.setattr(
        slurm, "launch", lambda sweep, spec: launched.append(([p.point.index for p in sweep.planned], spec)) or []
    )
    assert main(["resume", str(tmp_path)]) == 0
    expected = SlurmSpec(
        array_parallelism=2, srun_args=["--a"], additional_parameters={"hold": True}, signal_delay_s=60,
        max_num_timeout=3, gpus_per_node="0", cpus_per_task=4, setup=[],
    )  # fmt: skip
    assert launched == [([0], expected)]
