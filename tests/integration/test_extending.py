"""The examples of docs/extend, written from the pages into a folder outside the package and run by their commands.

The example of an objective is tested by test_plugin.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.documentation import blocks, commands, write_files
from helpers.runs import VIT, rows
from PIL import Image

from clipx import compose
from clipx import train as command
from clipx.config.typed import last_of_each
from clipx.data.spec import open_data
from clipx.errors import ConfigError
from clipx.trainer.trainer import Trainer

# A few steps on little data of any source, in one process.
FEW = (
    *("data.batch_size=8", "data.workers=0", "duration=2st", "schedule.warmup=1st", "log_every=1st", "logger=[]"),
    *("report=false", "checkpoint=none"),
)
SHAPES = ("data.samples=64", "data.held_out_samples=16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(page: str) -> list[tuple[str, ...]]:
    """Writes the files of a page into the working directory. Returns the words of its commands."""
    write_files(page, Path.cwd())
    return [command.words for block in blocks(page) if block.language == "bash" for command in commands(block)]


def train(words: tuple[str, ...], name: str, *more: str) -> list[dict[str, float]]:
    """Runs what a shown command does, with further options. Returns the logged metrics."""
    assert words[:5] == ("python", "-m", "clipx.train", "--config-dir", "mine")
    Trainer(compose(*last_of_each([*words[5:], *FEW, f"run_dir={name}", *more]), config_dir="mine")).fit()
    return rows(Path(name))


def test_options_of_values_alone(folder: Path) -> None:
    (typed,) = shown("docs/extend/README.md")
    spec = compose(*typed[-1:], config_dir="mine")
    assert (spec.model.name, spec.model.image.size, spec.duration) == ("vit_small_64", 64, "20ep")
    assert spec.optimizer.kind == "adamw" and spec.optimizer.lr == 1e-3
    train(typed, "run", *SHAPES, "evaluator=[]", "model.text.width=16", "model.text.heads=2")


def test_an_optimizer(folder: Path) -> None:
    first, second = shown("docs/extend/optimizer.md")
    steps = train(first, "run", *SHAPES, *VIT, "evaluator=[]")
    assert all(row["train/loss"] > 0 for row in steps)
    spec = compose(*second[5:], config_dir="mine")
    assert spec.optimizer.ema_decay == 0.99
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum_decay=-1\.0 must be at least 0"):
        compose("optimizer=nadam", "optimizer.momentum_decay=-1", config_dir="mine")


def test_a_data_source(folder: Path) -> None:
    for i in range(24):
        Image.new("RGB", (48, 48), (10 * i, 0, 0)).save(f"{i}.jpg")
    lines = [json.dumps({"image": f"{i}.jpg", "captions": [f"red {i}", "red"]}) for i in range(24)]
    Path("train.jsonl").write_text("\n".join([*lines, '{"image": "24.jpg"}', "not JSON"]))
    (typed,) = shown("docs/extend/data.md")
    logged = train(typed, "run", "data.held_out_share=0.25")
    assert any("eval/retrieval/image_to_text/recall@1" in row for row in logged)
    opened = open_data(compose("data=json_lines", "data.path=train.jsonl", config_dir="mine").data)
    assert [record.key for record in opened.train.bad] == ["train.jsonl:25", "train.jsonl:26"]
    assert sum(opened.train.sizes) == 23 and list(opened.train.read(0).captions) == ["red 0", "red"]
    with pytest.raises(ConfigError, match=r"^data\.path has no value: it is required"):
        compose("data=json_lines", config_dir="mine")


def test_an_evaluator(folder: Path) -> None:
    first, second = shown("docs/extend/evaluator.md")
    logged = train(first, "run", *SHAPES, *VIT)
    (numbers,) = [row for row in logged if "eval/alignment/similarity" in row]
    assert -1 <= numbers["eval/alignment/similarity"] <= 1 and 0 <= numbers["eval/alignment/gap"] <= 2
    assert "eval/zeroshot/top1" in numbers
    assert compose(*second[5:], config_dir="mine").checkpoint.best == "eval/alignment/similarity"


def test_a_number_format(folder: Path) -> None:
    rounded, finer, tf32 = shown("docs/extend/precision.md")
    train(rounded, "coarse", *SHAPES, *VIT, "evaluator=[]")
    assert compose(*finer[5:], config_dir="mine").precision.bits == 7  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"precision\.tf32=true has no effect on cpu"):
        train(tf32, "tf32", *SHAPES, "distributed=cpu")


def test_a_model_with_a_further_output(folder: Path) -> None:
    (typed,) = shown("docs/extend/model.md")
    steps = train(typed, "run", *SHAPES, *VIT, "evaluator=[]", "data.micro_batches=2")
    assert all(row["train/spread"] > 0 for row in steps if "train/loss" in row)
    with pytest.raises(ConfigError, match="objective=infonce does not read the spreads of images that model=spread"):
        compose("model=spread", config_dir="mine")
    with pytest.raises(
        ConfigError, match="objective=certain reads spreads of images, which model=tiny does not return"
    ):
        compose("objective=certain", config_dir="mine")


def test_a_logger(folder: Path) -> None:
    first, second = shown("docs/extend/logger.md")
    train((*first[:5], "logger=[table]"), "run", *SHAPES, *VIT, "evaluator=[]", "logger=[table]")
    header, *lines = (folder / "run/metrics.csv").read_text().splitlines()
    assert header.split(",")[:2] == ["step", "samples"] and [line.split(",")[0] for line in lines] == ["1", "2"]
    assert compose(*second[5:], config_dir="mine").logger["table"].separator == ";"  # type: ignore[attr-defined]


def test_the_values_of_a_sites_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dry, *_ = shown("docs/extend/launcher.md")
    monkeypatch.setattr("sys.argv", list(dry[2:]))
    command.main()
    script = capsys.readouterr().out
    assert "#SBATCH --partition=debug" in script and "module load cuda/12.8" in script


def test_a_name_of_clipx_is_refused(folder: Path) -> None:
    (folder / "mine/objective").mkdir(parents=True)
    (folder / "mine/objective/infonce.yaml").touch()
    (folder / "theirs/model").mkdir(parents=True)
    (folder / "theirs/model/coca_tiny.yaml").touch()
    with pytest.raises(ConfigError, match=r"has no effect beside the option model/coca_tiny of coca: give it"):
        compose(config_dir="theirs")
    with pytest.raises(ConfigError, match=r"infonce\.yaml has no effect beside the option objective/infonce of clipx"):
        compose(config_dir="mine")
