"""Starts of rows of both tables: runs, weights, shards, configurations. Each is made when a row names it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pyarrow
import timm
import torch
import transformers
from pyarrow import parquet

from clipx.export import export
from clipx.extra.embed.command import embed
from clipx.extra.prepare.vocabulary import vocabulary
from clipx.trainer.trainer import Trainer
from clipx.weights.open_clip import to_open_clip
from helpers.dino_txt import save_head
from helpers.hf_models import CONFIGS, save_config, save_tokenizer
from helpers.open_clip_models import filled
from helpers.runs import VIT, compose, small
from helpers.samples import jpeg, write_tar

DATA = ("data.samples=75", "data.held_out_samples=20")  # of all rows on generated pictures


class Inputs(dict[str, str]):
    """Values by name, made by the functions of `MAKE` in a folder with that name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> str:
        (self.folder / name).mkdir()
        self[name] = MAKE[name](self.folder / name, self)
        return self[name]


def _run(folder: Path, inputs: Inputs) -> str:
    """A run of one step on the pictures of the rows."""
    Trainer(small(folder / "run", *VIT, *DATA, "duration=1st", "schedule.warmup=0st")).fit()
    return str(folder / "run")


def _embeddings(folder: Path, inputs: Inputs) -> str:
    """Embeddings of their images and captions by the model of `run`."""
    wide = ("dtype=float64", "precision=fp64")
    embed(compose(f"run={inputs['run']}", f"out={folder}/out", *wide, config_name="embed"))  # type: ignore[arg-type]
    return str(folder / "out")


def _views(folder: Path, inputs: Inputs) -> str:
    """Two folders of stored views of their images, of two teachers: a list of teacher.embeddings."""
    words = ("data=shapes", *DATA, "data.crop_scale=[0.3,1.0]", "views=3")
    for name, size in (("a", 40), ("b", 32)):
        given = (f"run={inputs['run']}", f"out={folder}/{name}", f"samples_per_shard={size}", *words)
        embed(compose(*given, config_name="embed"))  # type: ignore[arg-type]
    return f"[{folder}/a,{folder}/b]"


def _features(folder: Path, inputs: Inputs) -> str:
    """Features of the image trunk of `run` in shards, and a tokenizer of the words of the captions."""
    for split in ("train", "held_out"):
        words = (f"split={split}", "features=trunk", "format=webdataset", "samples_per_shard=40")
        embed(compose(f"run={inputs['run']}", f"out={folder}/{split}", *words, config_name="embed"))  # type: ignore[arg-type]
    vocabulary(compose("data=shapes", *DATA, f"out={folder}/words.json", config_name="vocabulary"))  # type: ignore[arg-type]
    return str(folder)


def _words(folder: Path, inputs: Inputs) -> str:
    """The number of words of that tokenizer."""
    return str(len(json.loads(Path(inputs["features"], "words.json").read_text())["model"]["vocab"]))


def _trunk(folder: Path, inputs: Inputs) -> str:
    """An image model, as timm.models.save_for_hf writes it."""
    model = filled(timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, embed_dim=48, num_heads=4))
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return str(folder)


def _head(folder: Path, inputs: Inputs) -> str:
    """A published vision head of dino.txt for one block above `trunk`."""
    return str(save_head(folder / "head.pth", 48, 1))


def _xlm_roberta(folder: Path, inputs: Inputs) -> str:
    """The configuration of a small text model of transformers, with a tokenizer."""
    save_tokenizer(folder)
    return save_config(folder, "xlm-roberta")


def _bert(folder: Path, inputs: Inputs) -> str:
    """A text model of transformers with its weights."""
    transformers.AutoModel.from_config(CONFIGS["bert"]()).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def _resnet(folder: Path, inputs: Inputs) -> str:
    """A run whose image tower is a ResNet."""
    Trainer(small(folder / "run", *DATA, "duration=1st", "schedule.warmup=0st")).fit()
    return str(folder / "run")


def _short(folder: Path, inputs: Inputs) -> str:
    """A run with 12 text positions."""
    words = (*VIT, *DATA, "model.text.context_length=12", "duration=1st", "schedule.warmup=0st")
    Trainer(small(folder / "run", *words)).fit()
    return str(folder / "run")


def _open_clip_checkpoint(folder: Path, inputs: Inputs) -> str:
    """A checkpoint for open_clip's trainer, of a run of two epochs of 64 samples."""
    words = (*VIT, "model.image.size=32", "data.samples=64", "optimizer.decay_rule=published", "duration=4st")
    Trainer(small(folder / "run", *words)).fit()
    given = (f"run={folder}/run", f"out={folder}/epoch_2.pt", "format=open_clip_checkpoint")
    export(compose(*given, config_name="export"))  # type: ignore[arg-type]
    return f"{folder}/epoch_2.pt"


def _bare(folder: Path, inputs: Inputs) -> str:
    """Weights of model=tiny by open_clip's names, without a configuration."""
    spec = compose("model=tiny").model
    torch.save(to_open_clip(spec, spec.build(torch.device("cpu"), torch.float32).state_dict()), folder / "bare.pt")
    return f"{folder}/bare.pt"


def _aspects(folder: Path, inputs: Inputs) -> str:
    """95 pictures of many aspect ratios, with a caption each."""
    drawn, members = random.Random(0), []
    for i in range(95):
        members += [(f"{i:05d}.jpg", jpeg(i, drawn.randint(20, 90), drawn.randint(20, 90)))]
        members += [(f"{i:05d}.txt", f"picture {drawn.choice(['red', 'old', 'small'])} {i % 10} of {i // 10}".encode())]
    write_tar(folder / "00000.tar", members)
    return str(folder / "00000.tar")


def _table(folder: Path, inputs: Inputs) -> str:
    """A table of 40 images."""
    for i in range(40):
        (folder / f"{i}.jpg").write_bytes(jpeg(i))
    lines = [f"{i}.jpg,picture number {i}" for i in range(40)]
    (folder / "table.csv").write_text("\n".join(["filepath,caption", *lines]))
    return str(folder / "table.csv")


def _parquet(folder: Path, inputs: Inputs) -> str:
    """95 images with their captions, in row groups of 10."""
    images = [{"bytes": jpeg(i)} for i in range(95)]
    table = pyarrow.table({"image": images, "caption": [f"picture number {i}" for i in range(95)]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=10)
    return str(folder / "a.parquet")


def _columns(folder: Path, inputs: Inputs) -> str:
    """Tables with columns of odd types, damaged ones, and arrays."""
    images, captions = [jpeg(i) for i in range(4)], [f"caption {i}" for i in range(4)]
    tables = {
        "struct": {"filepath": ["a.jpg"], "image": [{"path": "a.jpg"}], "caption": [{"text": "x"}]},
        "number": {
            "filepath": [1],
            "image": images[:1],
            "caption": [1.5],
            "label": [[1]],
            "weight": ["heavy"],
            "key": [0.5],
        },
        "list": {"filepath": ["a.jpg"], "image": images[:1], "caption": [[{"text": "x"}]]},
        "bytes": {"filepath": images, "caption": captions},
        "scores": {"index": [0.5], "key": ["a"], "reason": [None], "words": ["many"], "entries": [["a"]]},
        "whole": {"filepath": ["a.jpg"], "image": images[:1], "caption": ["x"]},
    }
    for name, columns in tables.items():
        parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    whole = (folder / "whole.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[:-9])
    (folder / "encrypted.parquet").write_bytes(b"PARE" + whole[4:-4] + b"PARE")
    twice = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 3, ["filepath", "caption", "caption"])
    parquet.write_table(twice, folder / "twice.parquet")
    numpy.save(folder / "objects.npy", numpy.array([None]))
    numpy.save(folder / "square.npy", numpy.zeros((2, 2)))
    return str(folder)


MAKE = {
    "columns": _columns,
    "run": _run,
    "embeddings": _embeddings,
    "views": _views,
    "features": _features,
    "words": _words,
    "trunk": _trunk,
    "head": _head,
    "bert": _bert,
    "resnet": _resnet,
    "short": _short,
    "open_clip_checkpoint": _open_clip_checkpoint,
    "bare": _bare,
    "aspects": _aspects,
    "table": _table,
    "parquet": _parquet,
    "xlm_roberta": _xlm_roberta,
}
