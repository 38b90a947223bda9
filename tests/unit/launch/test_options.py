"""Options of the launchers, and their generated scripts, without SLURM."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import small
from helpers.slurm_jobs import LOCAL, QUICK, output_of, refused
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import OmegaConf

from clipx.trainer.spec import compose
from clipx_launch import cluster, snapshot
from clipx_launch.point import Point, Result, config_hash
from clipx_launch.sbatch_script import sbatch_script
from clipx_launch.slurm_spec import SlurmSpec


def test_time_limits_of_partitions_are_converted_to_minutes() -> None:
    printed = {"infinite": None, "1-00:00:00": 1440, "2:30:00": 150, "30:00": 30}
    assert {text: cluster.minutes_of(text) for text in printed} == printed


def test_a_file_for_submitit_slurm_has_only_keys_of_clipx_slurm() -> None:
    """Also with their types: the defaults of all keys are values of the same keys here."""
    theirs = {key: value for key, value in vars(SlurmQueueConf()).items() if key != "_target_"}
    merged: Any = OmegaConf.merge(OmegaConf.structured(SlurmSpec), theirs)
    assert OmegaConf.to_container(merged, resolve=False).items() >= theirs.items()


@pytest.mark.parametrize(
    ("options", "gpus", "lines"),
    [
        ({"tasks_per_node": 4}, 4, {"gpus-per-node": "4"}),
        ({"tasks_per_node": 4, "gpus_per_node": "0"}, 0, {}),
        ({"tasks_per_node": 4, "gpus_per_node": "a100:3,v100:1"}, 4, {"gpus-per-node": "a100:3,v100:1"}),
        ({"tasks_per_node": 2, "gpus_per_task": "a100:1", "cpus_per_gpu": 6}, 2,
         {"gpus-per-task": "a100:1", "cpus-per-gpu": "6"}),
        ({"tasks_per_node": 2, "gpus_per_task": "0"}, 0, {}),
        ({"tasks_per_node": 2, "gres": "gpu:a100:2,nvme:1"}, 2, {"gres": "gpu:a100:2,nvme:1"}),
        ({"gres": "gpu"}, 1, {"gres": "gpu"}),
        ({"gres": "nvme:1"}, 1, {"gpus-per-node": "1", "gres": "nvme:1"}),
    ],
)  # fmt: skip
def test_each_rank_has_a_gpu_by_one_of_the_keys(
    tmp_path: Path, options: dict[str, Any], gpus: int, lines: dict[str, str]
) -> None:
    spec = SlurmSpec(**options)
    found = parsed(sbatch_script(spec, tmp_path, {0: tmp_path / "0"}, snapshot.environment(None)))
    assert spec.gpus == gpus
    assert {key: value for key, value in found.items() if "gpu" in key or key == "gres"} == lines
    assert found.get("cpus-per-task") == (None if spec.cpus_per_gpu else "8")


# ------------------------------------------------------------------------------------------------------ the script


def parsed(text: str) -> dict[str, str]:
    """Returns the #SBATCH directives as a dictionary."""
    lines = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    return dict(line.removeprefix("--").partition("=")[::2] for line in lines)


def test_every_option_is_in_the_generated_script(tmp_path: Path) -> None:
    spec = SlurmSpec(
        name="mine", partition="a,b", account="me", qos="high", constraint="h200&ib", nodes=2, tasks_per_node=4,
        gpus_per_node="a100:4", cpus_per_task=6, mem_gb=1.5, timeout_min=1440, array_parallelism=1, signal_delay_s=60,
        setup=["module load cuda"], srun_args=["--container-image=a b"], additional_parameters={"mail_type": "END", "exclusive": True},
        environment={"WORDS": "two $words"}, pass_environment=["A", "B"], max_num_timeout=3, max_preemption=4, max_retry=2,
    )  # fmt: skip
    folders = {0: tmp_path / "a b", 1: tmp_path / "c"}
    text = sbatch_script(spec, tmp_path, folders, snapshot.environment(None))
    assert parsed(text) == {
        "array": "0-1%1", "job-name": "mine", "partition": "a,b", "account": "me", "qos": "high", "constraint": "h200&ib",
        "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "a100:4", "cpus-per-task": "6", "mem": "1536M", "time": "1440",
        "signal": "USR2@60", "mail-type": "END", "exclusive": "", "export": "ALL,A,B", "requeue": "", "open-mode": "append",
        "chdir": str(Path.cwd()), "output": f"{tmp_path}/.launch/logs/%A_%a.log", "comment": str(tmp_path),
    }  # fmt: skip
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "\nmodule load cuda\n" in text
    assert "'--container-image=a b'" in text
    assert "WORDS='two $words'" in text
    assert "max_num_timeout=3 max_preemption=4 max_retry=2 " in text
    assert " mem_gb=1.5 " in text and "\npass_environment=(A B)\n" in text
    assert f"\n[0]='{tmp_path}/a b'\n[1]={tmp_path}/c\n" in text


# ----------------------------------------------------------------------------------------------- the command line


def test_invalid_points_are_listed_in_a_table_and_no_point_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*LOCAL, *QUICK, f"hydra.sweep.dir={tmp_path}/s", "hydra.launcher.tasks_per_node=2")
    assert refused(monkeypatch, capsys, *options, "seed=0,-1,one", "data.batch_size=32,33").splitlines() == [
        "error: 5 of 6 points cannot run, nothing was started:",
        "  point 1  data.batch_size=32 seed=-1   seed=-1 must be in [0, 2^63): give 0 or more",
        "  point 2  data.batch_size=32 seed=one  seed=one must be a whole number in [0, 2^63): the default is 0",
        "  point 3  data.batch_size=33 seed=0    data.batch_size=33 is not divisible by 2 ranks: use 32 or 34",
        "  point 4  data.batch_size=33 seed=-1   seed=-1 must be in [0, 2^63): give 0 or more",
        "  point 5  data.batch_size=33 seed=one  seed=one must be a whole number in [0, 2^63): the default is 0",
    ]
    assert not (tmp_path / "s").exists()


# --------------------------------------------------------------------------------------------------------- files


def test_the_first_failed_rank_sets_the_result_of_a_point(tmp_path: Path) -> None:
    spec = small(tmp_path / "run")
    point = Point(folder=tmp_path / "run", index=0, overrides=["seed=0"], content=config_hash(spec))
    point.create(spec)
    assert Point.read(tmp_path / "run") == point
    assert point.spec() == spec
    assert point.result is None
    point.write_result(Result("failed", 1, error="the cause"))
    point.write_result(Result("failed", 1, error="what came of it"))
    assert point.result == Result("failed", 1, error="the cause")
    files = sorted(f"{path.relative_to(point.launch_dir)}" for path in point.launch_dir.rglob("*"))
    assert files == ["config.yaml", "local", "local/result.json", "logs", "point.json"]


def test_the_hash_of_a_point_ignores_its_name_and_folder() -> None:
    content = config_hash(compose("name=a", "run_dir=b"))
    assert content == config_hash(compose("name=c", "run_dir=d", "resume=auto"))
    assert content != config_hash(compose("seed=1"))


def test_a_changed_file_is_in_another_snapshot(tmp_path: Path) -> None:
    code, copies = tmp_path / "package", tmp_path / "copies"
    code.mkdir()
    (code / "a.py").write_text("x = 1\n")
    first = snapshot._copy([code], copies)
    (code / "a.py").write_text("x = 2\n")
    second = snapshot._copy([code], copies)
    assert [(copy / "package/a.py").read_text() for copy in (first, second)] == ["x = 1\n", "x = 2\n"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in a git repository with one commit, whose build/ is ignored."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    package = tmp_path / "work [1]/package"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    (package.parent / "notes").write_text("old\n")
    (package.parent / ".gitignore").write_text("build/\n")
    git(package.parent, "init", "-q")
    commit(package.parent)
    return package


def git(folder: Path, *words: str) -> str:
    return output_of("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words)


def commit(work: Path) -> None:
    git(work, "add", ".")
    git(work, "commit", "-q", "-m", "change")


def test_a_copy_has_the_git_commit_and_the_difference_from_it(package: Path, tmp_path: Path) -> None:
    """The difference applies to the commit, and names untracked files. A later commit of the same code changes none."""
    work, copies, head = package.parent, tmp_path / "copies", git(package, "rev-parse", "HEAD")
    clean = snapshot._copy([package], copies)
    assert [(clean / name).read_text() for name in ("git.commit", "git.diff")] == [f"{head}\n", ""]
    for path, text in ((package / "a.py", "x = 2\n"), (package / "new.py", "y\n"), (work / "notes", "of others\n")):
        path.write_text(text)
    git(work, "add", "package/a.py")
    (package / "__pycache__").mkdir()
    (package / "__pycache__/new.pyc").touch()
    copy = snapshot._copy([package], copies)
    diff = (copy / "git.diff").read_text()
    assert (copy / "git.commit").read_text() == f"{head}\n"
    assert diff.startswith("# untracked: package/new.py\ndiff --git a/package/a.py") and "notes" not in diff
    git(tmp_path, "clone", "-q", str(work), "clone")
    git(tmp_path / "clone", "apply", str(copy / "git.diff"))
    assert (tmp_path / "clone/package/a.py").read_text() == "x = 2\n"
    commit(work)
    assert snapshot._copy([package], copies) == copy and (copy / "git.diff").read_text() == diff


@pytest.mark.parametrize("case", ["no repository", "ignored", "git is not installed", "git does not end"])
def test_a_copy_without_git_has_the_code_alone(
    case: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "no repository":
        (package.parent / ".git").rename(tmp_path / "gone")
    elif case == "ignored":
        package = package.rename(package.parent / "build")
    else:
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setattr(snapshot, "_GIT_S", 0.1)
    if case == "git does not end":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/git").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
        (tmp_path / "bin/git").chmod(0o755)
    copy = snapshot._copy([package], tmp_path / "copies")
    assert [path.name for path in copy.iterdir()] == [package.name]
