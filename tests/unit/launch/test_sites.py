"""launch/sites: options compose, and recipes refer to existing files. No image is built, no job is submitted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.cases import slow_except
from helpers.slurm_jobs import launch

from clipx.config.registry import CONF_DIR

ROOT = CONF_DIR.parent
SITES = ROOT / "launch/sites"


@pytest.mark.parametrize(
    "name", slow_except(sorted(path.stem for path in (SITES / "hydra/launcher").glob("*.yaml")), "my_cluster")
)
def test_the_options_of_a_site_generate_a_script(tmp_path: Path, name: str) -> None:
    run = ("model=vit_b32", "data=laion400m", "data.shards=/data/{00000..41407}.tar", f"hydra.sweep.dir={tmp_path}/s")
    site = ("--config-dir", str(SITES), "-m", f"hydra/launcher={name}", "hydra.launcher.dry_run=true")
    text = launch(*site, *run).stdout
    for line in ("--partition=gpu", "--account=vision", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive"):
        assert f"#SBATCH {line}\n" in text
    assert "export HF_HOME=/scratch/huggingface\n" in text
    assert ("apptainer exec --nv" in text) == name.endswith("_apptainer")
    assert ("worker=(python -u -m clipx_launch.worker)" in text) == name.endswith("_pyxis")
    assert ("--container-image=" in text) == name.endswith("_pyxis")
    assert ("module load" in text) == (name == "my_cluster")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


STAND_INS = {
    "clipx-sweep": 'cat "$RUN"',  # prints the script of the run
    "torchrun": 'exec bash "$RUN"',
    "pbsdsh": 'shift 3; exec "$@"',
    "blaunch": 'shift 2; exec "$@"',
    "qsub": "touch resubmitted",
}


def shell_of(site: str) -> str:
    """Returns the shell script of a site's file."""
    text = (SITES / site).read_text()
    if site == "kubernetes.yaml":
        text = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    return str(text)


def site_folder(folder: Path, run: str) -> dict[str, str]:
    """Creates the files of a site in a folder. Returns the environment of a job whose ranks run the script `run`."""
    (folder / "bin").mkdir()
    for name, body in STAND_INS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "outputs/vit_b32").mkdir(parents=True)
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/activate").touch()
    (folder / "hosts").write_text("a\nb\n")
    (folder / "run").write_text(run)
    return {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder), "RUN": str(folder / "run"),
        "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": "hosts", "PBS_JOBID": "7", "JOB_COMPLETION_INDEX": "0",
        "LSB_DJOB_HOSTFILE": "hosts", "LSB_JOBID": "7", "RUN_DIR": "outputs/vit_b32",
    }  # fmt: skip


def logging(event: str) -> str:
    line = json.dumps({"time": 1, "event": event})
    return f"echo '{line}' >> outputs/vit_b32/events.jsonl"


@pytest.mark.parametrize("site", ["pbs.sh", "lsf.sh", "kubernetes.yaml"])
@pytest.mark.parametrize(("event", "ended", "code"), [("stopped", 1, 75), ("start", 1, 1), ("end", 0, 0)])
def test_a_run_that_saved_exits_with_75_although_torchrun_exits_with_1(
    tmp_path: Path, site: str, event: str, ended: int, code: int
) -> None:
    env = site_folder(tmp_path, f"{logging(event)}\nexit {ended}\n")
    done = subprocess.run(
        ["bash", "-c", shell_of(site)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == code, done.stderr
    starts = (tmp_path / "outputs/vit_b32/events.jsonl").read_text().count(event)
    assert starts == (1 if site == "kubernetes.yaml" else 2), "once on each host"
    assert (tmp_path / "resubmitted").exists() == (site == "pbs.sh" and event == "stopped")
