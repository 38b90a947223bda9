"""Commands that follow the runs of a sweep: their points, job arrays and options."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.inputs import Inputs
from helpers.slurm_jobs import LOCAL, launch, refused
from helpers.sweeps import make_sweep, states
from submitit.slurm.slurm import SlurmJob

from clipx.distributed.ddp import DdpSpec
from clipx.errors import ConfigError
from clipx.evaluate import EvaluateSpec
from clipx_launch import cluster, slurm
from clipx_launch.chain import Chain
from clipx_launch.local import _Runner
from clipx_launch.options import LocalSpec
from clipx_launch.planned import Planned
from clipx_launch.point import Point, Result
from clipx_launch.progress import ProgressDisplay
from clipx_launch.slurm_spec import SlurmSpec
from clipx_launch.sweep import Sweep


def chained(folder: Path, points: int, *names: str) -> Sweep:
    """Returns a sweep of runs that each have following commands of these names."""
    made = make_sweep(folder, *([f"seed={k}"] for k in range(points)))
    for run in list(made.planned):
        before = run.point
        for name in names:
            after = ".." if before is run.point else f"../{before.folder.name}"
            own = Point(
                folder=run.point.folder / name,
                index=run.point.index,
                overrides=[],
                content="x",
                command=name,
                after=after,
            )
            made.planned.append(Planned(own, SimpleNamespace(distributed=None), after=before))
            before = own
    made.pending = list(made.planned)
    return made


def folders(made: Sweep, limit: int) -> list[list[dict[int, str]]]:
    return [
        [{task: str(p.point.folder.relative_to(made.folder)) for task, p in array.items()} for array in chain]
        for chain in slurm._chains(made.pending, limit)
    ]


def test_each_array_is_followed_by_arrays_of_the_same_tasks(tmp_path: Path) -> None:
    made = chained(tmp_path, 3, "evaluate", "export")
    one, two = {0: "0", 1: "1"}, {0: "2"}
    expected = [[{k: f"{run}{name}" for k, run in runs.items()} for name in ("", "/evaluate", "/export")]
                for runs in (one, two)]  # fmt: skip
    assert folders(made, limit=2) == expected


def test_a_task_without_a_following_point_leaves_a_gap_in_the_next_array(tmp_path: Path) -> None:
    made = chained(tmp_path, 4, "evaluate")
    made.pending = [p for p in made.planned if p.point.label != "1/evaluate"]
    assert folders(made, 9)[0][1] == {0: "0/evaluate", 2: "2/evaluate", 3: "3/evaluate"}
    made.pending = [p for p in made.planned if p.after is None or p.point.index == 2]
    assert folders(made, 9)[0][1] == {0: "2/evaluate"}, "a single job has no tasks"


def submitted(made: Sweep, spec: SlurmSpec, monkeypatch: pytest.MonkeyPatch, limit: int = 9) -> list[tuple[int, str]]:
    """Returns the number of points and the dependency of each job that is submitted: 1, 2, …"""
    jobs: list[tuple[int, str]] = []

    def submit(folder: Path, array: dict[int, Planned], spec: SlurmSpec, code: Any, dependency: str) -> SlurmJob[None]:
        jobs.append((len(array), dependency))
        return SlurmJob(folder, f"{len(jobs)}")

    def record(array: dict[int, Planned], job: SlurmJob[None]) -> None:
        for task, planned in array.items():
            planned.point.job, planned.point.task = job.job_id, task if len(array) > 1 else None

    monkeypatch.setattr(slurm, "_create_folders", lambda *_, **__: {})
    monkeypatch.setattr(slurm, "_submit_array", submit)
    monkeypatch.setattr(slurm, "_record_array", record)
    monkeypatch.setattr(cluster, "max_array_size", lambda: limit)
    slurm._submit(made, spec, slurm._after(spec))
    return jobs


def test_a_job_waits_for_the_task_before_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = chained(tmp_path / "s", 2, "evaluate", "export")
    assert submitted(made, SlurmSpec(), monkeypatch) == [(2, ""), (2, "aftercorr:1"), (2, "aftercorr:2")]
    made = chained(tmp_path / "t", 1, "evaluate")
    assert submitted(made, SlurmSpec(after="77"), monkeypatch) == [(1, "afterok:77"), (1, "afterok:1")]
    made = chained(tmp_path / "u", 3, "evaluate")
    made.pending = [p for p in made.planned if p.after is None or p.point.index == 2]
    assert submitted(made, SlurmSpec(), monkeypatch) == [(3, ""), (1, "afterok:1_2")]
    made = chained(tmp_path / "v", 3, "evaluate")
    assert submitted(made, SlurmSpec(array_parallelism=1), monkeypatch, limit=2) == [
        (2, ""), (2, "aftercorr:1"), (1, "afterany:2"), (1, "afterok:3"),
    ]  # fmt: skip


def test_a_point_that_follows_a_finished_or_a_queued_run_is_submitted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = chained(tmp_path, 2, "evaluate")
    first, second = (planned.point for planned in made.planned[:2])
    first.write_result(Result("finished"))
    second.job, second.task = "5", 1
    made.pending = [p for p in made.planned if p.after is not None]
    assert sorted(submitted(made, SlurmSpec(), monkeypatch)) == [(1, ""), (1, "afterok:5_1")]


def test_a_command_runs_on_one_machine_and_without_ranks_on_the_cpu() -> None:
    spec = SlurmSpec(nodes=4, tasks_per_node=8, gres="gpu:a100:8")
    ranks, one = spec.of_command(distributed=True), spec.of_command(distributed=False)
    assert (ranks.nodes, ranks.tasks_per_node, ranks.gpus) == (1, 8, 8)
    assert (one.nodes, one.tasks_per_node, one.gpus) == (1, 1, 0)
    assert LocalSpec(tasks_per_node=8).of_command(distributed=False).tasks_per_node == 1


def test_a_point_that_follows_shows_what_it_waits_for(tmp_path: Path) -> None:
    made = chained(tmp_path, 1, "evaluate")
    run, follows = (planned.point for planned in made.planned)
    follows.launch_dir.mkdir(parents=True)
    follows.sweep = str(tmp_path)
    follows.write()
    made.save(LocalSpec())
    assert states(tmp_path)["0/evaluate"] == ("waiting", "after 0")
    assert follows.not_started() == Result("stopped", 130, error="not started: point 0 has not finished")
    run.write_result(Result("finished", value=0.5))
    assert follows.not_started() is None
    assert states(tmp_path)["0/evaluate"][1].startswith("in the queue of ")


def test_what_follows_a_run_that_is_launched_again_is_launched_again(tmp_path: Path) -> None:
    made = chained(tmp_path, 2, "evaluate")
    for planned in made.planned:
        planned.point.launch_dir.mkdir(parents=True, exist_ok=True)
        planned.point.write()
        if planned.point.label != "1":
            planned.point.write_result(Result("finished"))
    made.check(LocalSpec())
    assert [planned.point.label for planned in made.pending] == ["1", "1/evaluate"]


def test_a_moved_sweep_resumes_its_commands_on_its_own_runs(tmp_path: Path, inputs: Inputs) -> None:
    spec = EvaluateSpec(run=str(tmp_path / "gone/0"), evaluator={}, distributed=DdpSpec())
    point = Point(folder=tmp_path / "0/evaluate", index=0, overrides=[], content="x", command="evaluate", after="..")
    point.create(spec)
    (planned,) = Sweep.from_points(tmp_path, [point]).planned
    assert (planned.spec.run, planned.point.command, planned.point.after) == (f"{tmp_path}/0", "evaluate", "..")


def test_the_scripts_of_a_chain_name_its_jobs_and_dependencies(tmp_path: Path) -> None:
    sweep = tmp_path / "lr"
    words = ("-m", "hydra/launcher=clipx_slurm", "hydra.launcher.dry_run=true", "distributed=cpu", "seed=0,1")
    then = 'hydra.launcher.then=[evaluate, "export format=hf", export]'
    text = launch(*words, then, f"hydra.sweep.dir={sweep}", "hydra.launcher.nodes=2").stdout
    scripts = text.split("#!/bin/bash")[1:]
    names = ("", "/evaluate", "/export", "/export-2")
    assert [f"[1]={sweep}/1{name}\n" in script for script, name in zip(scripts, names, strict=True)] == [True] * 4
    assert ["--nodes=2" in script for script in scripts] == [True, False, False, False]
    waits = [script.count("--dependency=") + script.count("--kill-on-invalid-dep=yes") for script in scripts]
    assert waits == [0, 2, 2, 2]
    assert all("#SBATCH --job-name=lr\n" in script and f"--comment={sweep}\n" in script for script in scripts)
    assert not sweep.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train", "train is no command that can be launched: "),
        ("bench", "bench is no command that can be launched: "),
        ("export format=onnx", "format=onnx is not a format that is written: choose one of "),
        ("evaluate stepp=3", "stepp is not a key here"),
        ("evaluate run=outputs/a", "run=outputs/a is set to the run that it follows: remove it"),
        ("export optimizer=adamw", "optimizer=adamw has no effect on clipx-export: remove it"),
        ("check", "expected has no value: it is required, add expected=…"),
        ('export "out=a', "cannot be read (No closing quotation): correct its quotes"),
    ],
)
def test_a_command_of_a_chain_that_cannot_run_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"hydra.launcher.then={text}") + ".*" + re.escape(says)):
        Chain([text], [])


def test_repeated_commands_of_a_chain_have_numbers(tmp_path: Path) -> None:
    chain = Chain(["export format=hf", "evaluate step=3 data.workers=0", "export"], [])
    found = {name: spec for name, _, spec in chain.specs(tmp_path)}
    assert list(found) == ["export", "evaluate", "export-2"]
    assert {spec.run for spec in found.values()} == {str(tmp_path)}
    assert (found["evaluate"].step, found["evaluate"].changes) == ("3", ["data.workers=0"])


def test_points_of_this_machine_start_when_what_they_follow_has_finished(tmp_path: Path) -> None:
    made = chained(tmp_path, 2, "export")
    runner, board = _Runner(made, LocalSpec(), {}, []), ProgressDisplay(made)
    waiting = list(made.planned)
    first, second = (runner._next(waiting, board) for _ in range(2))
    assert first is not None and second is not None and (first.point.label, second.point.label) == ("0", "1")
    runner._running = [cast("Any", SimpleNamespace(point=planned.point)) for planned in (first, second)]
    assert runner._next(waiting, board) is None
    runner._running.clear()
    first.point.write_result(Result("failed", 1, error="a bug"))
    second.point.write_result(Result("finished"))
    following = runner._next(waiting, board)
    assert following is not None and following.point.label == "1/export"
    assert made.planned[2].point.result == Result("stopped", 130, error="not started: point 0 has not finished")


def test_a_command_that_cannot_run_is_refused_before_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inputs: Inputs
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        ("export", "run=nowhere"): "run=nowhere holds no run (no config.yaml): check the path",
        ("export", f"run={inputs['run']}", "hydra.launcher.tasks_per_node=2"):
            "hydra.launcher with 2 ranks has no effect on clipx.export, which has one: set tasks_per_node and nodes to 1",
        ("evaluate", "run=nowhere"): "run=nowhere holds no run (no config.yaml): check the path",
        ("evaluate", f"run={inputs['run']}", "hydra.launcher.then=[export]"):
            "hydra.launcher.then=[export] has no effect after clipx.evaluate: remove it",
        ("plan", "data=shapes"): "plan is no command that can be launched: those that can are in clipx --help",
    }  # fmt: skip
    for (name, *words), says in cases.items():
        error = refused(monkeypatch, capsys, *LOCAL, *words, command=f"clipx.{name}")
        assert error == f"error: 1 of 1 point cannot run, nothing was started:\n  point 0  {says}\n"
    assert not (tmp_path / "outputs").exists()
