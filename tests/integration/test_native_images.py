"""A run on images at their own aspect ratio is evaluated, embedded and trained further."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers.runs import SMALL, compose, rows
from helpers.samples import jpeg, write_tar

from clipx.embed import embed
from clipx.errors import CheckpointError
from clipx.evaluate import evaluate
from clipx.export import export
from clipx.trainer.spec import RunSpec
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_weights

TOWER = "patch_size:8,embed_dim:32,depth:2,num_heads:2,pos_embed_grid_size:[4,4]"
OPTIONS = (
    *(option for option in SMALL if "samples=" not in option),
    *("model=naflex_tiny", "model.image.max_tokens=20", "model.text.width=16", "model.text.heads=2"),
    *("evaluator=[retrieval]", "evaluator.retrieval.every=2st", "data=webdataset", "data.held_out_share=0.2"),
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """80 images of many aspect ratios, each with a caption of its own."""
    drawn = random.Random(0)
    members = []
    for i in range(80):
        image = jpeg(i, drawn.randint(20, 90), drawn.randint(20, 90))
        caption = f"picture {drawn.choice(['red', 'old', 'small'])} {i % 10} of {i // 10}"
        members += [(f"{i:05d}.jpg", image), (f"{i:05d}.txt", caption.encode())]
    path = tmp_path_factory.mktemp("shards") / "00000.tar"
    write_tar(path, members)
    return str(path)


def spec(shards: str, run_dir: Path, *overrides: str) -> RunSpec:
    words = (f"data.shards={shards}", f"model.image.options={{{TOWER}}}")
    return compose(*OPTIONS, *words, f"run_dir={run_dir}", f"name={run_dir.name}", *overrides)


@pytest.fixture(scope="module")
def trained(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "alone"
    Trainer(spec(shards, run_dir)).fit()
    return run_dir


def test_the_commands_evaluate_and_embed_a_run(trained: Path, tmp_path: Path) -> None:
    own = [row for row in rows(trained) if "eval/retrieval/image_to_text/recall@5" in row][-1]
    assert own["eval/retrieval/image_to_text/recall@5"] >= 0
    evaluate(compose(f"run={trained}", "evaluator=[retrieval]", f"out={tmp_path}/result", config_name="evaluate"))
    embed(compose(f"run={trained}", f"out={tmp_path}/embedded", "split=held_out", config_name="embed"))
    assert list((tmp_path / "embedded").glob("*.npy"))
    for format in ("open_clip", "hf"):
        with pytest.raises(CheckpointError, match="open_clip has no tower for model.image.native=true"):
            export(compose(f"run={trained}", f"format={format}", f"out={tmp_path}/{format}", config_name="export"))


def test_weights_start_a_run_with_more_patches(trained: Path, shards: str, tmp_path: Path) -> None:
    more = Trainer(spec(shards, tmp_path / "more", f"model.weights={trained}", "model.image.max_tokens=30"))
    weights = load_weights(str(trained))
    for key, value in more.learner.model.state_dict().items():
        torch.testing.assert_close(value, weights.model[key].float(), rtol=0, atol=0)
    more.close()
