"""launch/sites: options compose, and recipes refer to existing files. No image is built, no job is submitted."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers.slurm_jobs import launch

from clipx.config.registry import CONF_DIR
from clipx.trainer.spec import compose

ROOT = CONF_DIR.parent
SITES = ROOT / "launch/sites"


@pytest.mark.parametrize("name", sorted(path.stem for path in (SITES / "hydra/launcher").glob("*.yaml")))
def test_the_options_of_a_site_generate_a_script(tmp_path: Path, name: str) -> None:
    run = ("model=vit_b32", "data=laion400m", "data.shards=/data/{00000..41407}.tar", f"hydra.sweep.dir={tmp_path}/s")
    site = ("--config-dir", str(SITES), "-m", f"hydra/launcher={name}", "hydra.launcher.dry_run=true")
    text = launch(*site, *run).stdout
    for line in ("--partition=gpu", "--account=vision", "--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive"):
        assert f"#SBATCH {line}\n" in text
    assert "export HF_HOME=/scratch/huggingface\n" in text
    assert ("apptainer exec --nv" in text) == name.endswith("_apptainer")
    assert ("module load" in text) != name.endswith("_apptainer")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("recipe", ["Dockerfile", "clipx.def"])
def test_images_copy_all_sources_of_the_wheel(recipe: str) -> None:
    text = (SITES / recipe).read_text()
    if recipe == "Dockerfile":
        copied = {word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()}
    else:
        copied = set(re.findall(r"^ +(\S+) /opt/clipx/\1$", text, re.M))
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    needed = {name.split("/")[0] for name in wheel} | {"pyproject.toml", project["project"]["readme"], "LICENSE"}
    assert copied == needed


def test_the_kubernetes_job_composes_and_requests_its_nodes_and_gpus() -> None:
    service, job = yaml.safe_load_all((SITES / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = shlex.split(container["args"][0])
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    nodes, gpus = int(options["nnodes"]), int(options["nproc-per-node"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert options["master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    spec = compose(*words[words.index("clipx.train") + 1 :])
    spec.data.check_ranks(nodes * gpus)
    assert spec.resume == "auto"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_readme_names_each_file() -> None:
    text = (ROOT / "launch/README.md").read_text()
    for path in SITES.rglob("*.*"):
        assert path.is_dir() or f"`{path.relative_to(SITES)}`" in text
    assert "`Dockerfile`" in text
