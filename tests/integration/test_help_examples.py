"""Runs the examples in the help of each command, on small inputs with the names that the examples use."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pyarrow
import pytest
from helpers.documentation import Command, clipx_words, commands, help_block
from helpers.runs import SMALL, VIT, run, small
from helpers.samples import jpeg, write_tar
from helpers.sweeps import make_sweep
from helpers.sweeps import train as train_point
from pyarrow import parquet

from clipx.commands import commands as modules_of_commands
from clipx.trainer.trainer import Trainer
from clipx_launch.__main__ import main as sweep_main

# Need published models, take long, or vary another example. `test_docs_commands.py` composes them.
ELSEWHERE = re.compile(
    r"clipx\.train -m|run=MODEL|format=hf|clipx\.bench (loss|step) ?(?!--help)|vit_l14|published|soup=|epoch_32|step=all|method=sample|s3://.*tar|mine\.yaml"
)
NAMES = {"/data/{0000..0123}": "data/{0000..0001}", "s3://bucket": "bucket", "step=1000": "step=1"}
TRAINED = (*SMALL, *VIT, "duration=1st", "schedule.warmup=0st")
FEW = ("data.samples=75", "data.held_out_samples=20")
# Overrides that make an example small, by a text of it. The first match counts.
CHANGES = {
    "tokenizer=words.json": ("model=tiny", *SMALL[:-2], "duration=1st", "schedule.warmup=0st", "run_dir=outputs/words"),
    "data=csv data.path=pairs.csv duration": (*TRAINED[2:], "data.batch_size=8", "model=tiny", "run_dir=outputs/csv"),
    "data.shards=data/": (*TRAINED[2:], "data.batch_size=8", "model=tiny", "run_dir=outputs/shards"),
    "clipx.train": (*TRAINED, "run_dir=outputs/default"),
    "clipx.wise_ft": ("alphas=[0.5]", "data=shapes", *FEW, "reference.samples=75", "reference.held_out_samples=20"),
    "clipx.look data=shapes": ("samples=20", *FEW),
    "clipx.plan": ("model=tiny",),
    "clipx.vocabulary": FEW,
    "clipx.score data=shapes": FEW,
    "clipx.prepare": ("processes=1",),
}  # fmt: skip
ENDS_WITH_1 = "clipx.check"  # the run misses its expected results


def make_inputs() -> None:
    """Writes what the examples name into the current folder: images, tables, shards, runs and a sweep."""
    for name in ("images", "pictures", "data", "results"):
        Path(name).mkdir()
    captions = [f"picture number {i}" for i in range(40)]
    for i, caption in enumerate(captions):
        Path(f"images/{i:02}.jpg").write_bytes(jpeg(i))
        Path(f"images/{i:02}.txt").write_text(caption)
    shutil.copy("images/00.jpg", "pictures")
    lines = [f"images/{i:02}.jpg,{caption}" for i, caption in enumerate(captions)]
    Path("pairs.csv").write_text("\n".join(["filepath,caption", *lines]))
    images = [{"bytes": jpeg(i)} for i in range(40)]
    parquet.write_table(pyarrow.table({"image": images, "caption": captions}), "train-0.parquet")
    for shard in range(2):
        members = [((f"{i:05}.jpg", jpeg(i)), (f"{i:05}.txt", captions[i].encode())) for i in range(20)]
        write_tar(Path(f"data/{shard:04}.tar"), [member for sample in members for member in sample])
    Path("shards.txt").write_text("data/0000.tar\ndata/0001.tar\n")
    Path("results/eval_results.jsonl").write_text('{"key": "imagenet1k", "metrics": {"main_metric": 0.1}}\n')
    one_step = ("duration=1st", "schedule.warmup=0st")
    Trainer(small(Path("outputs/COCA"), "model=coca_tiny", *FEW, *one_step)).fit()
    common = (*VIT, *FEW, *one_step, "evaluator=[zeroshot]")
    for planned in make_sweep(Path("outputs/sweep").absolute(), ["seed=0"], ["seed=1"], common=common).planned:
        train_point(planned)
    for name in ("RUN", "BASE", "FINETUNED"):
        shutil.copytree("outputs/sweep/0", f"outputs/{name}", ignore=shutil.ignore_patterns(".launch"))


@pytest.mark.slow
@pytest.mark.long
def test_the_examples_in_the_help_of_each_command_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPX_CC12M", "data/{0000..0001}.tar")
    make_inputs()
    wrong = []
    for module in modules_of_commands().values():
        for command in commands(help_block(module)):
            if not ELSEWHERE.search(command.text):
                wrong += example_fails(command)
    assert not wrong, "\n".join(wrong)


def example_fails(command: Command) -> list[str]:
    """Runs an example. Returns its error, if it fails."""
    for name in ("shards", "FOLDER"):  # of an example before it
        shutil.rmtree(name, ignore_errors=True)
    words, text = clipx_words(command) or [], command.text.replace("'", "")
    for name, here in NAMES.items():
        words, text = [word.replace(name, here) for word in words], text.replace(name, here)
    changes = next((changes for part, changes in CHANGES.items() if part in text), ())
    if words[0] == "clipx_launch":
        code = sweep_main(words[1:])
        return [f"{command}: {code}"] if code else []
    done = run(sys.executable, "-m", *words, *changes, check=False)
    expected = int(ENDS_WITH_1 in text)
    return (
        []
        if done.returncode == expected
        else [f"{command}: {done.returncode}\n{done.stdout[-500:]}{done.stderr[-2000:]}"]
    )
