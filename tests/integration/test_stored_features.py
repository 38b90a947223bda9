"""A text tower trains on features that `clipx.embed` wrote: shards, evaluation, resume, ranks and export."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import SMALL, compose, rows, small

from clipx.data.transform import decode, eval_transform
from clipx.data.vocabulary import vocabulary
from clipx.embed import embed
from clipx.errors import CheckpointError
from clipx.evaluate import evaluate
from clipx.export import export
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_into, load_weights

TRAIN, HELD_OUT, TRUNK = 320, 64, 96
IMAGES = (f"data.samples={TRAIN}", f"data.held_out_samples={HELD_OUT}", "model.text.width=16", "model.text.heads=2")
OPTIONS = tuple(option for option in SMALL if "samples=" not in option)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image model after a few steps."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    Trainer(small(run_dir, *IMAGES, "model.text.layers=1", "duration=8st")).fit()
    return run_dir


@pytest.fixture(scope="module")
def stored(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trunk features of both splits in shards, and a tokenizer of the words of the captions."""
    folder = tmp_path_factory.mktemp("stored")
    for split in ("train", "held_out"):
        written(teacher, folder / split, f"split={split}", "features=trunk")
    vocabulary(compose("data=shapes", *IMAGES[:2], f"out={folder}/words.json", config_name="vocabulary"))
    return folder


def written(run_dir: Path, out: Path, *overrides: str) -> None:
    options = (f"run={run_dir}", f"out={out}", "format=webdataset", "samples_per_shard=100", *overrides)
    embed(compose(*options, config_name="embed"))


def words(folder: Path) -> tuple[str, ...]:
    size = len(json.loads((folder / "words.json").read_text())["model"]["vocab"])
    tokenizer = (f"model.text.tokenizer={folder}/words.json", f"model.text.vocabulary={size}")
    return (*tokenizer, "model.text.pool=last", "model.text.packed=false", "model.text.context_length=20")


def features(folder: Path, *overrides: str) -> tuple[str, ...]:
    """Returns the options of a run on the stored features."""
    shards = (f"data.shards={folder}/train/*.tar", f"data.held_out_shards={folder}/held_out/*.tar")
    keys = ("data.caption_key=json.captions", "data.label_key=json.label")
    model = ("model=stored_features", f"model.image.features={TRUNK}")
    return (*OPTIONS, *model, *words(folder), "data=webdataset", *shards, *keys, *overrides)


def trained(run_dir: Path, options: tuple[str, ...]) -> Trainer:
    trainer = Trainer(compose(*options, f"run_dir={run_dir}"))
    trainer.fit()
    return trainer


def samples(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields (key, array, json) of all samples of the shards."""
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            contents = {member.name: tar.extractfile(member) for member in tar.getmembers()}
            found = {name: file.read() for name, file in contents.items() if file is not None}
        keys = sorted({name.partition(".")[0] for name in found})
        assert found.keys() == {f"{key}.{extension}" for key in keys for extension in ("npy", "json")}
        for key in keys:
            yield key, np.load(io.BytesIO(found[f"{key}.npy"])), json.loads(found[f"{key}.json"])


@pytest.mark.parametrize("kind", ["trunk", "embedding"])
def test_shards_hold_the_features_of_the_model_captions_and_labels(
    teacher: Path, stored: Path, tmp_path: Path, kind: str
) -> None:
    folder, dtype = stored / "held_out", np.float32
    if kind == "embedding":
        folder, dtype = tmp_path, np.float16
        written(teacher, folder, "split=held_out", "dtype=float16")
    found = load_weights(str(teacher))
    assert found.spec is not None
    model = found.spec.build(torch.device("cpu"), torch.float32).eval()
    load_into(model, found)
    source = compose(*SMALL, *IMAGES).data.open().held_out
    assert source is not None
    read = list(samples(folder))
    assert [key for key, _, _ in read] == [f"{i:09d}" for i in range(HELD_OUT)]
    for index, (_, row, meta) in enumerate(read):
        sample = source.read(index)
        assert meta == {"captions": list(sample.captions), "label": sample.label}
        assert row.dtype == dtype and row.ndim == 1
        if index % 16:
            continue
        image = torch.tensor(eval_transform(decode(sample.image, 10**6), 48)).permute(2, 0, 1)[None]
        with torch.no_grad():
            of_trunk = model.encode_trunk(image)
            torch.testing.assert_close(
                model.encode_image(image), torch.nn.functional.normalize(model.image.projection(of_trunk), dim=-1)
            )
            expected = of_trunk if kind == "trunk" else model.encode_image(image)
        np.testing.assert_allclose(row, expected[0].numpy(), rtol=0, atol=1e-4 if kind == "trunk" else 1e-3)


def test_a_text_tower_learns_from_the_features_far_above_chance(stored: Path, tmp_path: Path) -> None:
    evaluators = ("evaluator=[zeroshot,retrieval]", "evaluator.zeroshot.every=end", "evaluator.retrieval.every=end")
    names = tuple(f"evaluator.zeroshot.{key}={stored}/train/{key}.txt" for key in ("classnames", "templates"))
    longer = ("duration=12ep", "data.batch_size=64", "optimizer.lr=3e-3", "log_every=10st", "data.workers=1")
    trainer = trained(tmp_path / "run", features(stored, *evaluators, *names, *longer))
    assert trainer.learner.model.image.projection.weight.shape == (64, TRUNK)
    last = rows(tmp_path / "run")[-1]
    for direction in ("image_to_text", "text_to_image"):
        assert last[f"eval/retrieval/{direction}/recall@10"] > 2.5 * 10 / HELD_OUT, last
    assert 0 < last["eval/zeroshot/chance"] < 0.01
    options = (f"run={tmp_path / 'run'}", f"out={tmp_path}/result")
    evaluate(compose(*options, config_name="evaluate"))
    Trainer(compose(*features(stored, f"model.weights={tmp_path}/run"), f"run_dir={tmp_path}/further")).close()
    with pytest.raises(CheckpointError, match=r"^open_clip has no tower for model\.image\.features=96: use format="):
        export(compose(f"run={tmp_path}/run", "format=open_clip", f"out={tmp_path}/folder", config_name="export"))
