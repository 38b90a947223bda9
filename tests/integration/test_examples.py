"""The options of examples/README.md compose as its pages show, and the notebook runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from helpers import CODE, ROOT
from helpers.documentation import blocks, commands
from helpers.examples import load
from nbclient import NotebookClient

from clipx import compose
from clipx.config.registry import CONF_DIR

EXAMPLES = ROOT / "examples"
CONF = EXAMPLES / "conf"
NAMES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PAGES = ("examples/README.md", "examples/openclipart/README.md")
COMMANDS = [command.words for page in PAGES for block in blocks(page) for command in commands(block)]
study = load("fastclip_study.py")


def command(*named: str) -> tuple[str, ...]:
    """Returns the words of the command of the page that has all of these words."""
    (found,) = [words for words in COMMANDS if set(named) <= set(words)]
    assert found[:2] == ("python", "-m")
    return found[1:]


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_in_the_table_with_its_command_and_composes(name: str) -> None:
    path = CONF / f"experiment/{name}.yaml"
    assert f"`examples/conf/experiment/{name}.yaml`" in (EXAMPLES / "README.md").read_text()
    shown = re.search(
        rf"python -m clipx\.train (--config-dir examples/conf (?:-m )?experiment={name}\b.*)", path.read_text()
    )
    assert shown and shown[1].replace("'", "").split() == list(command(f"experiment={name}")[2:])
    values = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "defaults"}
    needed = {"distil_student": "teacher.weights=a", "finetune_weights": "model.weights=a"}.get(name, "seed=0")
    spec = compose(f"experiment={name}", needed, config_dir=CONF)
    assert spec.duration == values["duration"]


@pytest.mark.slow
def test_the_notebook_trains_plots_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CODE)
    text = (EXAMPLES / "notebook.ipynb").read_text()
    assert "duration=5ep" in text
    notebook = nbformat.reads(text.replace("duration=5ep", "duration=3ep"), as_version=4)
    there = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=there).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    texts = [output.get("data", {}).get("text/plain", "") for output in outputs]
    (metrics,) = [text for text in texts if text.startswith("{'eval/")]
    assert float(re.search(r"text_to_image/recall@1': ([\d.]+)", metrics)[1]) > 0.1  # type: ignore[index]
    assert re.match(r"\[\([\d.]+, '", texts[-1])


def test_the_contenders_of_fastclips_study_are_those_of_the_folder_with_tuned_values() -> None:
    names = {**study.CONTENDERS, **study.SUCCESSORS}
    assert {path.stem for path in (CONF_DIR / "experiment/fastclip_small").glob("*.yaml")} == set(names)
    for name in names:
        spec = compose("experiment=fastclip_small", f"{study.CONTENDER}={name}", "data.batch_size=64")
        assert spec.objective.kind == ("infonce" if name == "infonce_constant" else name)
        assert 1e-4 < spec.optimizer.lr < 1e-2


@pytest.mark.slow
def test_the_plugin_package_is_installed_and_passes_its_tests(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "plugin", tmp_path / "plugin")
    installed = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "--target", str(installed), str(tmp_path / "plugin")], check=True)
    path = os.pathsep.join(map(str, (installed, ROOT, ROOT / "launch")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "plugin/tests")]
    done = subprocess.run(test, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    shown = [c.words for b in blocks("examples/plugin/README.md") for c in commands(b) if "clipx.train" in c.words]
    for words in shown:
        more = [] if "--help" in words else ["--cfg", "job"]
        done = subprocess.run(
            [sys.executable, *words[1:], *more], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert "margin" in done.stdout
