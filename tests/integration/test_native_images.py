"""A run on images at their own aspect ratio is evaluated, embedded and trained further."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.inputs import Inputs
from helpers.runs import SMALL, compose, rows

from clipx.errors import CheckpointError
from clipx.evaluate import evaluate
from clipx.export import export
from clipx.extra.embed.command import embed
from clipx.trainer.spec import RunSpec
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_weights

TOWER = "patch_size:8,embed_dim:32,depth:2,num_heads:2,pos_embed_grid_size:[4,4]"
OPTIONS = (
    *(option for option in SMALL if "samples=" not in option),
    *("model=naflex_tiny", "model.image.max_tokens=20", "model.text.width=16", "model.text.heads=2"),
    *("evaluator=[retrieval]", "evaluator.retrieval.every=2st", "data=webdataset", "data.held_out_share=0.2"),
)


def spec(inputs: Inputs, run_dir: Path, *overrides: str) -> RunSpec:
    words = (f"data.shards={inputs['aspects']}", f"model.image.options={{{TOWER}}}")
    return compose(*OPTIONS, *words, f"run_dir={run_dir}", f"name={run_dir.name}", *overrides)


@pytest.fixture(scope="module")
def trained(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "alone"
    Trainer(spec(inputs, run_dir)).fit()
    return run_dir


def test_the_commands_evaluate_and_embed_a_run(trained: Path, tmp_path: Path) -> None:
    own = [row for row in rows(trained) if "eval/retrieval/image_to_text/recall@5" in row][-1]
    assert own["eval/retrieval/image_to_text/recall@5"] >= 0
    evaluate(compose(f"run={trained}", "evaluator=[retrieval]", f"out={tmp_path}/result", config_name="evaluate"))
    embed(compose(f"run={trained}", f"out={tmp_path}/embedded", "split=held_out", config_name="embed"))
    assert list((tmp_path / "embedded").glob("*.npy"))
    for format in ("open_clip", "hf"):
        with pytest.raises(
            CheckpointError, match="open_clip has no layout for model.kind=naflex: export it with format=safetensors"
        ):
            export(compose(f"run={trained}", f"format={format}", f"out={tmp_path}/{format}", config_name="export"))


def test_weights_start_a_run_with_more_patches(trained: Path, inputs: Inputs, tmp_path: Path) -> None:
    more = Trainer(spec(inputs, tmp_path / "more", f"model.weights={trained}", "model.image.max_tokens=30"))
    weights = load_weights(str(trained))
    for key, value in more.learner.model.state_dict().items():
        torch.testing.assert_close(value, weights.model[key].float(), rtol=0, atol=0)
    more.close()
