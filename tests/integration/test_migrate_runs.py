"""Every row of the pages for users of open_clip and of FastCLIP trains a few steps, on toys of what it names.

Rows without a key in common train together. If they fail, each trains by itself, so that the row at fault is named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import timm
from helpers.migration import BASE, FASTCLIP, OPEN_CLIP, settings, tables
from helpers.runs import compose, torchrun
from helpers.samples import jpeg, write_tar
from safetensors.torch import save_file

from clipx.config.typed import last_of_each, override_key
from clipx.export import export
from clipx.train import train

SAMPLES = 30
TOY = (
    *("data.batch_size=28", "data.workers=0", "duration=3ep", "schedule.warmup=1st", "log_every=3st"),
    *("compile.towers=false", "report=false"),
)
OFF = ("logger=[]", "evaluator=[]", "checkpoint=none")  # unless a row has keys of the group
_VIT = ("model.image.options={patch_size:16,embed_dim:32,depth:2,num_heads:2}", "model.image.size=32")
_TEXT = ("model.embed_dim=32", "model.text.width=32", "model.text.heads=2", "model.text.layers=2")
_COCA = ("model.decoder.layers=1", "model.decoder.heads=2", "model.queries=5", "model.pool_heads=2")
SHRUNK = {
    "rn": ("model.image.timm=test_resnet", "model.image.size=32", *_TEXT),
    "convnext": ("model.image.timm=test_convnext", "model.image.size=32", "model.image.options={}", *_TEXT),
    "coca": (*_VIT, *_TEXT, *_COCA),
    "siglip": (*_VIT, *_TEXT, *(f"model.text.{key}" for key in ("tokenizer=clip", "vocabulary=49408", "clean=clip"))),
    "": (*_VIT, *_TEXT),
}
# Values that belong to large data, to a device or to a service; and files, for which there are toys in the folder.
SMALLER = {
    r"schedule.warmup=\d+st": "schedule.warmup=1st",
    r"duration=[\d.e]+sa": "duration=100sa",
    r"data.batch_size=\d+": "data.batch_size=28",
    r"data.workers=\d+": "data.workers=1",
    r"model.image.size=336": "model.image.size=48",
    r"objective.rho=.*": "objective.rho=2",
    r"schedule.cooldown=4ep": "schedule.cooldown=2ep",
    r"duration=32ep": "duration=4ep",
    r"gamma.decay=18ep": "gamma.decay=3ep",
    r"profiler.steps=.*": "profiler.steps=[2,3]",
    r"precision.tf32=true": "precision.tf32=false",  # has no effect on a CPU
    r"templates=openai_imagenet": "templates=FOLDER/templates.txt",
    r"=/data/imagenet/val": "=FOLDER/imagenet",
    r"=/data/imagenetv2": "=FOLDER/v2",
    r"shards=(?!/).*|shards=/data/.*": "shards=FOLDER/{0..1}.tar",
    r"path=train.csv|path=val.csv": "path=FOLDER/SEPARATOR.csv",
    r"(model|teacher)\.weights=.*": r"\1.weights=FOLDER/weights",
    r"resume=logs.*": "resume=FOLDER/epoch_2.pt",
    r"=s3://bucket": "=file://FOLDER/bucket",
    r"=/scratch": "=FOLDER/scratch",
}
BESIDE = {
    "precision=int8": "precision.emulate=true precision.min_width=16",
    "compile.towers=true": "compile.backend=eager",
    "logger=[wandb]": "logger.wandb.mode=offline",
    "logger=[tensorboard,wandb]": "logger.wandb.mode=offline",
}
RANKS = ("distributed.backend", "distributed.sync_batchnorm", "distributed.static_graph")  # an error on one rank
ALONE = re.compile(r"experiment=|\.lock|weights=|resume=logs")  # rows that others do not fit, or that start otherwise

Row = tuple[str, list[str]]


def rows(page: Path) -> Iterator[Row]:
    """Yields (name, overrides) of each row of a page. Of a row of experiments one is drawn, of each column in turn."""
    for section, found in tables(page).items():
        for number, row in enumerate(found):
            if section == "Names of the models":
                yield from ((option, [f"model={option}"]) for option in re.findall(r"`(\w+)`", row[1]))
            elif section == "Experiments":
                words = settings(row[1:])
                yield row[0], words[number % len(words)]
            elif section != "Defaults that differ":
                words = settings(row[1:2] if row[0].startswith("`") else row[-1:])
                yield from ((f"{section}: {row[0]}", overrides) for overrides in words)


def on_ranks(words: Sequence[str]) -> bool:
    return any(word.startswith(RANKS) for word in words)


def conflict(words: Sequence[str], others: Sequence[str]) -> bool:
    """Returns whether overrides exclude others: another value of a key, or another option for keys of a group."""
    keys, values = ({str(override_key(word)): word for word in given} for given in (words, others))
    return on_ranks(words) != on_ranks(others) or any(
        key in (other, other.partition(".")[0]) or other == key.partition(".")[0]
        for key, mine in keys.items()
        for other, theirs in values.items()
        if mine not in others and theirs not in words
    )


def together(found: Iterable[Row]) -> list[list[Row]]:
    """Returns the rows in groups that train together."""
    groups: list[list[Row]] = []
    for name, row in found:
        words = [word for word in row if word not in BASE]
        alone = any(ALONE.search(word) for word in words)
        fit = [group for group in groups if not alone and not any(conflict(words, other) for _, other in group)]
        groups += [] if fit else [[]]
        (fit or groups[-1:])[0].append((name, words))
    return groups


def toy(words: Sequence[str], folder: Path, run_dir: Path) -> list[str]:
    """Returns the overrides of a run on toys: the given ones with smaller values, and what makes the rest small."""
    given = {str(override_key(word)): word for word in words}
    groups = {key.partition(".")[0] for key in given}
    separator = given.get("data.separator", "=comma").partition("=")[2]
    smaller = []
    for word in words:
        for pattern, value in SMALLER.items():
            word = re.sub(pattern, value, word)
        smaller += [word.replace("FOLDER", str(folder)).replace("SEPARATOR", separator)]
        smaller += BESIDE.get(word, "").split()
    experiment = given.get("experiment", "")
    model = "rn50" if "rn50" in experiment else given.get("model", "").partition("=")[2]
    shrunk = next(found for name, found in SHRUNK.items() if name in model)
    base = [*(BASE if not experiment else ()), *shrunk, f"run_dir={run_dir}", *TOY]
    if experiment or given.get("data", BASE[1]) == BASE[1]:
        base += [f"data.shards={folder}/{{0..1}}.tar"]
    if re.search(r"fastclip_v[23]|isogclr", experiment):
        base += ["objective.rho=2"]
    base += [word for word in OFF if word.partition("=")[0] not in groups and not (word == OFF[1] and experiment)]
    return last_of_each([*base, *smaller])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, tables, images of 1,000 classes, a template, and weights."""
    folder = tmp_path_factory.mktemp("toys")
    texts = [(f"title {i}", f"text {i}") for i in range(SAMPLES)]
    for number, first in enumerate((0, SAMPLES // 2)):
        members = [
            member
            for i in range(first, first + SAMPLES // 2)
            for member in ((f"{i:05d}.jpg", jpeg(i)), (f"{i:05d}.txt", texts[i][0].encode()))
        ]
        write_tar(folder / f"{number}.tar", members)
    for i in range(SAMPLES):
        (folder / f"{i}.jpg").write_bytes(jpeg(i))
    for name, separator in {"comma": ",", "semicolon": ";", "tab": "\t"}.items():
        lines = [("filepath", "image", "title", "text", "caption")]
        lines += [(f"{i}.jpg", f"{i}.jpg", *texts[i], "caption") for i in range(SAMPLES)]
        (folder / f"{name}.csv").write_text("\n".join(map(separator.join, lines)))
    for name in ("imagenet/n{:08d}", "v2/ImageNetV2-matched-frequency/{}"):
        for i in range(1000):
            (folder / name.format(i)).mkdir(parents=True)
            os.link(folder / f"{i % SAMPLES}.jpg", folder / name.format(i) / "a.jpg")
    (folder / "templates.txt").write_text("a photo of a {}.")
    words = ("checkpoint.every=2ep", "duration=2ep", "optimizer.decay_rule=published")
    train(compose(*toy(words, folder, folder / "run")))
    for name, form in {"weights": "open_clip", "epoch_2.pt": "open_clip_checkpoint"}.items():
        export(compose(f"run={folder}/run", f"out={folder}/{name}", f"format={form}", config_name="export"))  # type: ignore[arg-type]
    tower = "models--timm--vit_base_patch32_clip_224.laion2b_ft_in12k_in1k"
    snapshot = folder / "hub" / tower / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    twin = timm.create_model(
        "vit_base_patch32_clip_224", img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=2
    )
    save_file(twin.state_dict(), snapshot / "model.safetensors")
    (folder / "hub" / tower / "refs").mkdir()
    (folder / "hub" / tower / "refs/main").write_text("0" * 40)
    return folder


def fault(words: Sequence[str], folder: Path, run_dir: Path) -> str:
    """Trains a run on toys. Returns its error, or an empty string."""
    typed = toy(words, folder, run_dir)
    try:
        if on_ranks(words):
            done = torchrun(2, "-m", "clipx.train", *typed, check=False)
            return done.stderr if done.returncode else ""
        if "resume=latest" in words:
            train(compose(*(word for word in typed if not word.startswith("resume=")), "checkpoint.every=3st"))
        train(compose(*typed))
    except Exception as error:  # of any kind: it is reported with the name of the row
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow  # 35 s: 125 rows in 40 runs
def test_each_row_trains(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    failed = []
    for number, group in enumerate(together([*rows(OPEN_CLIP), *rows(FASTCLIP)])):
        words = last_of_each([word for _, overrides in group for word in overrides])
        error = fault(words, folder, tmp_path / str(number))
        if error:
            alone = [(name, fault(own, folder, tmp_path / f"{number}-{i}")) for i, (name, own) in enumerate(group)]
            failed += [f"{name}: {error}" for name, error in alone if error] or [f"{words}: {error}"]
    assert not failed, "\n".join(failed)
