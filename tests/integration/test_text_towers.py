"""Runs with text towers other than CLIP's: ranks, micro-batches, sharding, compilation, resume, evaluation, export."""

from __future__ import annotations

import sys
from pathlib import Path

import open_clip  # type: ignore[import-untyped]
import pytest
import torch
from helpers.hf_models import save_config, save_tokenizer
from helpers.runs import VIT, compose, run, small

from clipx.plan.dry import DryRun
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_model, load_weights

NO_DROPOUT = "model.text.options={hidden_dropout_prob:0.0,attention_probs_dropout_prob:0.0}"
HF = ("model/text=hf", "model.text.context_length=24")
MODERN = (
    *("model/text=modern_512", "model.text.width=16", "model.text.heads=2", "model.text.layers=2"),
    *("model.text.causal=false", "model.text.pool=map"),
)
TOWERS = ("xlm-roberta", "qwen3", "mt5", "modern")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def options(name: str, place: Path, dropout: bool = False) -> tuple[str, ...]:
    """Returns the overrides for a text tower."""
    image = VIT[:2]
    if name == "modern":
        return (*image, *MODERN)
    folder = place / name
    if not folder.is_dir():
        save_config(folder, name)
        save_tokenizer(folder)
    words = {"mt5": ("model.text.packed=false", "model.text.options={dropout_rate:0.0}"), "xlm-roberta": (NO_DROPOUT,)}
    of_tower = ("model.text.pool=end",) if name == "qwen3" else words[name]
    return (*image, *HF, f"model.text.source={folder}", *(of_tower if not dropout else of_tower[:-1]))


def test_the_weights_of_a_run_start_another(place: Path, tmp_path: Path) -> None:
    overrides = options("xlm-roberta", place)
    Trainer(small(tmp_path / "first", *overrides)).fit()
    weights = load_weights(str(tmp_path / "first"))
    again = Trainer(small(tmp_path / "second", *overrides, f"model.weights={tmp_path / 'first'}", "model.text.lock=1"))
    for key, value in again.learner.model.state_dict().items():
        torch.testing.assert_close(value, weights.model[key], rtol=0, atol=0)
    trained_text = {n for n, p in again.learner.model.text.named_parameters() if p.requires_grad}
    assert {n.split(".")[3] for n in trained_text if n.startswith("transformer.encoder.layer")} == {"2"}
    again.close()


def test_open_clip_loads_an_export_with_its_tokenizer(tmp_path: Path) -> None:
    source = save_config(tmp_path / "model", "xlm-roberta")
    save_tokenizer(tmp_path / "model", padding_side="left")
    words = ("model.text.pool=cls", "model.text.projection=mlp", "model.text.clean=whitespace")
    Trainer(small(tmp_path / "run", *VIT[:2], *HF, f"model.text.source={source}", *words)).fit()
    out = tmp_path / "out"
    run(sys.executable, "-m", "clipx.export", f"run={tmp_path / 'run'}", "format=open_clip", f"out={out}")
    theirs, *_ = open_clip.create_model_and_transforms(f"local-dir:{out}")
    texts = ["a photo of a large red star", "", "the blue circle"]
    weights, spec, ours = load_model(str(out), "run", torch.device("cpu"), torch.float32)
    tokens_BL = spec.text.build_tokenizer()(texts)
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{out}")(texts), tokens_BL)
    with torch.inference_mode():
        own_BD = ours.encode_text(tokens_BL)
        assert own_BD.std() > 0.01
        torch.testing.assert_close(theirs.eval().encode_text(tokens_BL, normalize=True), own_BD, atol=1e-5, rtol=0)
    of_run = load_weights(str(tmp_path / "run"))
    assert weights.model.keys() == of_run.model.keys()
    assert all(torch.equal(weights.model[key], of_run.model[key]) for key in of_run.model)


@pytest.mark.parametrize("name", TOWERS)
def test_the_plan_counts_shortened_towers_as_whole_ones(name: str, place: Path) -> None:
    spec = compose("model=tiny", *options(name, place)).model
    precision = compose().precision.build(torch.device("cpu"))
    short, whole = (DryRun(spec, precision, every_block=every) for every in (False, True))
    tokens = 9 if spec.text.packed else spec.text.context_length
    assert short.flops(tokens) == whole.flops(tokens)
    assert short.memory(8, tokens) == whole.memory(8, tokens)
