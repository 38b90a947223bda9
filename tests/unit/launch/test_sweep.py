"""Sweeps before they start, whose points are composed and checked, and the end of their points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.slurm_jobs import refused
from helpers.sweeps import make_sweep

from clipx_launch import progress, sweep
from clipx_launch.__main__ import main
from clipx_launch.point import Result
from clipx_launch.progress import ProgressDisplay
from clipx_launch.slurm_spec import SlurmSpec


def test_a_point_is_finished_only_with_the_same_configuration(tmp_path: Path) -> None:
    (before,) = make_sweep(tmp_path, ["seed=0"]).planned
    before.point.write_result(Result("finished", value=0.5))
    same, other = (sweep._plan(replace(before.spec, seed=seed), [f"seed={seed}"], 0) for seed in (0, 1))
    same.find_previous()
    other.find_previous()
    assert (same.finished, same.spec.resume) == (True, "auto")
    assert (other.finished, other.previous, other.spec.resume) == (False, None, "none")


def test_a_job_without_a_result_has_failed_at_the_second_poll_after_its_end(tmp_path: Path) -> None:
    """A shared file system may deliver the result later than SLURM the job's end."""
    made = make_sweep(tmp_path, ["seed=0"], ["seed=1"])
    late, lost = (planned.point for planned in made.planned)
    board, over = ProgressDisplay(made), set[int]()
    for number, point in enumerate((late, lost)):
        point.record_job("7", number)
        assert not progress._ended(point, {point.job_id or "": "COMPLETED"}, over, board)
    late.write_result(Result("finished", value=0.5))
    assert progress._ended(late, {"7_0": "COMPLETED"}, over, board)
    assert late.result == Result("finished", value=0.5)
    assert progress._ended(lost, {"7_1": "NODE_FAIL"}, over, board)
    assert lost.result == Result("failed", 1, error="job 7_1 is node fail")


def test_a_stopped_point_has_not_ended_while_its_job_is_requeued(tmp_path: Path) -> None:
    made = make_sweep(tmp_path, ["seed=0"])
    point, board = made.planned[0].point, ProgressDisplay(made)
    point.record_job("7", None)
    point.write_result(Result("stopped", 75, error="SIGUSR1: stopped after step 3"))
    assert not progress._ended(point, {"7": "PENDING"}, set(), board)


def test_ranks_do_not_start_a_sweep_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = refused(monkeypatch, capsys, "-m", "seed=0,1", "data=csv", f"hydra.sweep.dir={tmp_path}/sweep")
    assert says.startswith("error (rank 1): -m on each of several ranks would start the sweep several times: ")
    assert not (tmp_path / "sweep").exists()


NETWORK = {"interface": "ib0", "gloo_interface": None, "ib": None, "algo": None}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("network", NETWORK, "hydra.launcher.network.interface=ib0 of the sweep's launch has no effect in this version "
         "(NCCL, gloo and torch read environment variables, hydra.launcher.environment.NAME=…: NCCL_SOCKET_IFNAME "),
        ("style", "torchrun", "hydra.launcher.style=torchrun of the sweep's launch has no effect in this version (srun "
         "starts the ranks; clipx-sweep script torchrun prints a script): repeat the sweep's command with "),
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
