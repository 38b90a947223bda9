"""The wheel, installed and used outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from helpers.runs import SMALL, VIT, run

from clipx.config.registry import CONF_DIR
from clipx.config.typed import last_of_each


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    return target


def outside(installed: Path, cwd: Path, *arguments: str) -> str:
    """Runs Python with the installed wheel first on its path, in a folder without files of the checkout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(
        last_of_each(command), cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_contains_the_package_its_configuration_and_its_merges(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "clipx",
        "clipx_launch",
        "hydra_plugins",
        wheel.name.rsplit("-", 3)[0] + ".dist-info",
    }
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "clipx").rglob("*.py")}
    launch = {str(path.relative_to(ROOT / "launch")) for path in (ROOT / "launch").rglob("*.py")}
    assert modules | launch <= names
    conf = {f"clipx/conf/{path.relative_to(CONF_DIR)}" for path in CONF_DIR.rglob("*.yaml")}
    assert conf <= names
    extra = {str(path.relative_to(ROOT)) for path in (ROOT / "clipx/extra").rglob("*.yaml")}
    assert extra and extra <= names
    assert "clipx/model/bpe_simple_vocab_16e6.txt.gz" in names
    lists = {f"clipx/{path.relative_to(ROOT / 'clipx')}" for path in (ROOT / "clipx/data/lists").iterdir()}
    assert len(lists) == 4 and lists <= names  # ImageNet's names, two lists of templates, and their licences
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


@pytest.mark.slow
def test_the_commands_of_the_installed_wheel_work_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    shown = outside(installed, tmp_path, "-m", "clipx.train", "model=vit_l14", "data=laion400m", "--cfg", "job")
    assert yaml.safe_load(shown)["data"]["samples"] == 414_080_000
    assert list(tmp_path.iterdir()) == []
    outside(installed, tmp_path, "-m", "clipx.train", *SMALL, *VIT, "duration=2st", "schedule.warmup=1st", "name=run")
    assert (tmp_path / "outputs" / "run" / "config.yaml").is_file()
    outside(installed, tmp_path, "-m", "clipx.evaluate", "run=outputs/run", "evaluator=[zeroshot]")
    assert list((tmp_path / "outputs" / "run").glob("evaluation-*.json"))
