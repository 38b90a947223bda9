"""`clipx-sweep script`: scripts for manual launch."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers.runs import SMALL, VIT
from helpers.sweeps import make_sweep

from clipx_launch import slurm, snapshot
from clipx_launch.print_script import hydra_arguments, main
from clipx_launch.sbatch_script import sbatch_script
from clipx_launch.slurm_spec import SlurmSpec

IN_RUN_DIR = ("hydra.sweep.dir=${run_dir}", "hydra.sweep.subdir=.")
PRINTED = "hydra.launcher._target_=hydra_plugins.clipx_plugins.SlurmScriptPrinter"
RUN = (*SMALL, *VIT, "checkpoint=none", "distributed=cpu")


def directives(text: str) -> set[str]:
    return {shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH")}


@pytest.mark.parametrize(
    ("points", "spec"),
    [
        (1, SlurmSpec(signal_delay_s=9)),
        (3, SlurmSpec(
            name="mine", partition="a,b", account="me", qos="high", constraint="h200&ib", nodes=2, tasks_per_node=4,
            gpus_per_node="4", mem_gb=1.5, array_parallelism=2, additional_parameters={"mail_type": "END", "exclusive": True, "hint": None},
            environment={"WORDS": "two $words", "NCCL_SOCKET_IFNAME": "ib0"},
        )),
    ],
)  # fmt: skip
def test_the_printed_script_equals_the_submitted_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: SlurmSpec, points: int
) -> None:
    """Submits to an `sbatch` that stores its input, from a process with a rank."""
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted\nenv > {tmp_path}/env\necho Submitted batch job 7\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LOCAL_RANK", "3")
    sweep = make_sweep(tmp_path / "s", *([f"seed={k}"] for k in range(points)), spec=spec)
    code = snapshot.environment(None)
    array = dict(enumerate(sweep.planned))
    folders = {task: planned.point.folder for task, planned in array.items()}
    printed = sbatch_script(spec, sweep.folder, folders, code)
    job = slurm._submit_array(sweep.folder, array, spec, code, "")
    slurm._record_array(array, job)
    assert (tmp_path / "submitted").read_text() == printed
    assert "LOCAL_RANK=" not in (tmp_path / "env").read_text() and os.environ["LOCAL_RANK"] == "3"
    assert [planned.point.job_id for planned in sweep.planned] == (["7"] if points == 1 else ["7_0", "7_1", "7_2"])
    assert (sweep.folder / "0/.launch/script.sh").read_text() == printed
    assert (sweep.folder / ".launch/7_submission.sh").stat().st_mode & 0o777 == 0o600
    assert f"--signal=USR2@{spec.signal_delay_s}" in directives(printed)
    assert subprocess.run(["bash", "-n"], input=printed, text=True, check=False).returncode == 0
    exported = dict(re.findall(r"^export (\w+)=(.*)$", printed, re.M))
    assert points == 1 or (exported["NCCL_SOCKET_IFNAME"], exported["WORDS"]) == ("ib0", "'two $words'")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["nodes=2", "--", "seed=1"], ["seed=1", *IN_RUN_DIR, "hydra/launcher=clipx_slurm", "hydra.launcher.nodes=2", PRINTED]),
        (["--", "seed=1,2"], ["seed=1,2", "hydra/launcher=clipx_slurm", PRINTED]),
        (["--", "hydra.sweep.dir=a", "s={"], ["hydra.sweep.dir=a", "s={", "hydra/launcher=clipx_slurm", PRINTED]),
        (["sbatch", "+additional_parameters={a: 1}"], [*IN_RUN_DIR, "hydra/launcher=clipx_slurm", "+hydra.launcher.additional_parameters={a: 1}", PRINTED]),
        (["torchrun", "host=a", "--"], [*IN_RUN_DIR, "hydra/launcher=clipx_torchrun", "hydra.launcher.host=a"]),
        (["launcher=site", "--", "--config-dir", "m"], ["--config-dir", "m", *IN_RUN_DIR, "hydra/launcher=site", PRINTED]),
    ],
)  # fmt: skip
def test_words_of_the_command_become_launcher_options(words: list[str], command: list[str]) -> None:
    assert hydra_arguments(words) == ["-m", *command]


@pytest.mark.parametrize("kind", ["sbatch", "torchrun"])
def test_the_script_of_one_run_uses_its_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([kind, *(["gpus_per_node=0"] if kind == "sbatch" else []), "--", *RUN, "name=mine"]) == 0
    text = capfd.readouterr().out
    assert f"{tmp_path}/outputs/mine" in text
    assert ("resume=auto" in text) == (kind == "torchrun"), "SLURM's job resumes by its number of restarts"
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert found == (["outputs/mine"] if kind == "sbatch" else []), "the torchrun script writes no files"
    if kind == "sbatch":
        assert (tmp_path / "outputs/mine/.launch/point.json").is_file()
        assert (tmp_path / "outputs/mine/.launch/sweep.json").is_file()
