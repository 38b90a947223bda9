"""Runs on images at their own aspect ratio: ranks, micro-batches, sharding, compilation, resume, evaluation, export."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from helpers.runs import SMALL, compose, rows
from helpers.samples import jpeg, write_tar

from clipx.embed import embed
from clipx.errors import CheckpointError, ConfigError
from clipx.evaluate import evaluate
from clipx.export import export
from clipx.model.flops import ForwardFlops
from clipx.model.image_packing import PackedImages
from clipx.model.patches import read_grids
from clipx.trainer.spec import RunSpec
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_into, load_weights

TOWER = "patch_size:8,embed_dim:32,depth:2,num_heads:2,pos_embed_grid_size:[4,4]"
OPTIONS = (
    *(option for option in SMALL if "samples=" not in option),
    *("model=naflex_tiny", "model.image.max_tokens=20", "model.text.width=16", "model.text.heads=2"),
    *("evaluator=[retrieval]", "evaluator.retrieval.every=2st", "data=webdataset", "data.held_out_share=0.2"),
)
FP64 = ("precision=fp64", "optimizer.ema_decay=0.9", "optimizer.clip_norm=0.5", "checkpoint.every=4st")


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


def spec(shards: str, run_dir: Path, *overrides: str, tower: str = "") -> RunSpec:
    words = (f"data.shards={shards}", f"model.image.options={{{TOWER}{tower}}}")
    return compose(*OPTIONS, *words, f"run_dir={run_dir}", f"name={run_dir.name}", *overrides)


@pytest.fixture(scope="module")
def trained(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "alone"
    Trainer(spec(shards, run_dir, *FP64)).fit()
    return run_dir


def test_steps_count_the_tokens_of_their_images(shards: str, tmp_path: Path) -> None:
    trainer = Trainer(spec(shards, tmp_path / "run", "device_peak_tflops=0.1"))
    batch = next(iter(trainer._batches()))
    (images,) = batch.image_inputs(1)
    assert isinstance(images, PackedImages)
    grids = read_grids(batch.image)
    assert len(grids.unique(dim=0)) > 4
    assert batch.image_tokens == int(grids.prod(1).sum())
    trainer.fit()
    for row in (row for row in rows(tmp_path / "run") if "train/mfu" in row):
        rate = row["train/image_tokens_per_second"] / row["train/samples_per_second"]
        assert 10 < rate <= 20
        flops = ForwardFlops.of(trainer.spec.model)
        done = flops.image * row["train/image_tokens_per_second"] / 20
        done += flops.text * row["train/tokens_per_second"] / trainer.spec.model.text.context_length
        assert row["train/mfu"] == pytest.approx(3 * done / 0.1e12)


# --------------------------------------------------------------------------------------------- after training


def test_the_commands_evaluate_and_embed_a_run(trained: Path, tmp_path: Path) -> None:
    own = [row for row in rows(trained) if "eval/retrieval/image_to_text/recall@5" in row][-1]
    assert own["eval/retrieval/image_to_text/recall@5"] >= 0
    evaluate(compose(f"run={trained}", "evaluator=[retrieval]", f"out={tmp_path}/result", config_name="evaluate"))
    embed(compose(f"run={trained}", f"out={tmp_path}/embedded", "split=held_out", config_name="embed"))
    assert list((tmp_path / "embedded").glob("*.npy"))
    for format in ("open_clip", "hf"):
        with pytest.raises(CheckpointError, match="open_clip has no tower for model.image.native=true"):
            export(compose(f"run={trained}", f"format={format}", f"out={tmp_path}/{format}", config_name="export"))


def test_weights_start_a_run_with_more_patches_and_none_on_squares(trained: Path, shards: str, tmp_path: Path) -> None:
    more = Trainer(spec(shards, tmp_path / "more", f"model.weights={trained}", "model.image.max_tokens=30"))
    weights = load_weights(str(trained))
    for key, value in more.learner.model.state_dict().items():
        torch.testing.assert_close(value, weights.model[key].float(), rtol=0, atol=0)
    more.close()
    square = compose("model=naflex_tiny", "model.image.native=false", "model.image.max_tokens=256").model
    model = square.build(torch.device("cpu"), torch.float32)
    with pytest.raises(CheckpointError, match="model.image.native=true, expected false"):
        load_into(model, weights)
    student = (*SMALL, f"run_dir={tmp_path}/student", "objective=distillation", f"teacher.weights={trained}")
    with pytest.raises(ConfigError, match="reads images at their own aspect ratio") as error:
        Trainer(compose(*student))
    assert "\n" not in str(error.value)
