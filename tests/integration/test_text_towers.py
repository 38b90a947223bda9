"""Runs with text towers other than CLIP's: ranks, micro-batches, sharding, compilation, resume, evaluation, export."""

from __future__ import annotations

from pathlib import Path

import open_clip  # type: ignore[import-untyped]
import torch
from helpers.hf_models import save_config, save_tokenizer
from helpers.runs import VIT, compose, small

from clipx.export import export
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_model, load_weights

HF = ("model/text=hf", "model.text.context_length=24")


def test_open_clip_loads_an_export_with_its_tokenizer(tmp_path: Path) -> None:
    source = save_config(tmp_path / "model", "xlm-roberta")
    save_tokenizer(tmp_path / "model", padding_side="left")
    words = ("model.text.pool=cls", "model.text.projection=mlp", "model.text.clean=whitespace")
    Trainer(small(tmp_path / "run", *VIT[:2], *HF, f"model.text.source={source}", *words)).fit()
    out = tmp_path / "out"
    export(compose(f"run={tmp_path / 'run'}", "format=open_clip", f"out={out}", config_name="export"))  # type: ignore[arg-type]
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
