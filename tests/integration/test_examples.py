"""The examples of examples/README.md run on small data, by the commands that its pages show."""

from __future__ import annotations

import csv
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
from helpers.runs import rows, run, tensors
from nbclient import NotebookClient
from PIL import Image
from webdataset import TarWriter

from clipx import compose

EXAMPLES = ROOT / "examples"
CONF = EXAMPLES / "conf"
NAMES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PAGES = ("examples/README.md", "examples/openclipart/README.md")
COMMANDS = [command.words for page in PAGES for block in blocks(page) for command in commands(block)]
FEW = (
    *("data.batch_size=8", "data.workers=0", "duration=2st", "schedule.warmup=1st", "log_every=1st", "report=false"),
    *("logger=[]", "checkpoint.every=end"),
)
SHAPES = ("data.samples=64", "data.held_out_samples=24")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the commands run, with the examples and small data of two layouts."""
    path = tmp_path_factory.mktemp("examples")
    shutil.copytree(CONF, path / "examples/conf")
    with (path / "train.csv").open("w", newline="") as file, TarWriter(str(path / "00000.tar")) as shard:
        table = csv.writer(file)
        table.writerow(["filepath", "caption"])
        for i in range(32):
            Image.new("RGB", (64, 48), (8 * i, 0, 255 - 8 * i)).save(path / f"{i}.jpg")
            table.writerow([f"{i}.jpg", f"colour {i}"])
            shard.write(
                {
                    "__key__": f"{i:09}",
                    "jpg": (path / f"{i}.jpg").read_bytes(),
                    "txt": f"colour {i}",
                    "json": {"caption": f"colour {i}", "status": "success", "key": f"{i:09}"},
                }
            )
    return path


@pytest.fixture
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def command(*named: str) -> tuple[str, ...]:
    """Returns the words of the command of the page that has all of these words."""
    (found,) = [words for words in COMMANDS if set(named) <= set(words)]
    assert found[:2] == ("python", "-m")
    return found[1:]


def test_training_on_a_table_and_on_shards(there: Path) -> None:
    words = command("experiment=train_on_csv")
    run(sys.executable, *words, *FEW, "model=tiny", "data.held_out_share=0.25", "checkpoint.best=null")
    assert any("eval/retrieval/image_to_text/recall@1" in row for row in rows(there / "outputs/my_clip"))
    run(sys.executable, *command("clipx.evaluate", "run=outputs/my_clip"))
    words = command("experiment=train_on_webdataset")
    run(sys.executable, *words, *FEW, "model=tiny", "data.held_out_share=0.25", "data.shards=00000.tar")
    assert [row["step"] for row in rows(there / "outputs/web") if "train/loss" in row] == [1, 2]


@pytest.mark.slow
def test_fine_tuning_averaging_and_distillation(there: Path) -> None:
    run(sys.executable, *command("clipx.train", "name=base"), *FEW, *SHAPES, "evaluator=[]")
    run(sys.executable, *command("experiment=finetune_weights"), *FEW, *SHAPES, "evaluator=[retrieval]")
    mixed = ("data.samples=64", "data.held_out_samples=24", "reference.samples=64", "reference.held_out_samples=24")
    workers = ("data.workers=0", "reference.workers=0", "alphas=[0,0.5,1]")
    run(sys.executable, *command("clipx.wise_ft"), *mixed, *workers)
    assert (there / "outputs/mixed").exists()
    base, tuned = (tensors(Path(f"outputs/{name}"), 2) for name in ("base", "finetuned"))
    assert base.keys() & tuned.keys()
    run(sys.executable, *command("experiment=distil_student"), *FEW, *SHAPES, "evaluator=[]")
    assert all(row["train/distill_loss"] > 0 for row in rows(there / "outputs/student") if "train/loss" in row)


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


def executed(text: str, folder: Path) -> list[str]:
    """Executes a notebook. Returns the texts of its outputs."""
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    return [output.get("data", {}).get("text/plain", "") for output in outputs]


@pytest.mark.slow
def test_the_notebook_trains_plots_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CODE)
    texts = executed((EXAMPLES / "notebook.ipynb").read_text(), tmp_path)
    (metrics,) = [text for text in texts if text.startswith("{'eval/")]
    assert float(re.search(r"text_to_image/recall@1': ([\d.]+)", metrics)[1]) > 0.1  # type: ignore[index]
    assert re.match(r"\[\([\d.]+, '", texts[-1])


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
