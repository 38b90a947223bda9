"""Runs whose image tower starts from weights of timm: resume, export, a further tower."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.inputs import Inputs
from helpers.runs import VIT, compose, interrupt, small, tensors
from safetensors.torch import load_file

from clipx.export import export
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_weights

TOWER = ("model.image.timm=vit_tiny_patch16_224", "model.image.options={depth:2,embed_dim:48,num_heads:4}", *VIT[2:])
PIXELS = "pixels are normalized by mean=[0.5,0.5,0.5] std=[0.5,0.5,0.5], as in the training of these weights"


def test_a_locked_trunk_remains_that_of_timm_and_resumes_bit_for_bit(inputs: Inputs, tmp_path: Path) -> None:
    words = (*TOWER, "model.image.lock=all", "model.image.projection=none", "model.embed_dim=48")
    words += ("checkpoint.every=2st", "duration=4st", "model.image.options.drop_path_rate=0.5")
    place = f"model.image.weights={inputs['trunk']}"
    Trainer(small(tmp_path / "whole", *words, place)).fit()
    interrupt(Trainer(small(tmp_path / "parts", *words, place)), 3)
    Trainer(small(tmp_path / "parts", *words, "model.image.weights=/gone", "resume=auto")).fit()
    whole, parts = (tensors(tmp_path / which, 4) for which in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    for name, tensor in load_file(Path(inputs["trunk"], "model.safetensors")).items():
        if not name.startswith("head."):
            assert torch.equal(whole[f"model/image.trunk.{name}"], tensor)


def test_a_run_is_exported_without_its_sources_and_starts_a_tower(inputs: Inputs, tmp_path: Path) -> None:
    words = (*TOWER, f"model.image.weights={inputs['trunk']}", "model.image.lock=0", "model.image.head_blocks=1")
    Trainer(small(tmp_path / "run", *words, f"model.image.head_weights={inputs['head']}")).fit()
    out = tmp_path / "out.safetensors"
    export(compose(f"run={tmp_path / 'run'}", "format=safetensors", f"out={out}", config_name="export"))  # type: ignore[arg-type]
    found, of_run = load_weights(str(out)), load_weights(str(tmp_path / "run"))
    assert found.spec is not None and found.spec.tower_weights == {}
    assert found.spec.image.head_weights is None
    assert found.model.keys() == of_run.model.keys()
    other = (*TOWER, f"model.image.weights={out}", "model.embed_dim=24", "model.image.head_blocks=1")
    trainer = Trainer(small(tmp_path / "other", *other))
    assert trainer.run.facts["weights"].split("; ")[1:] == [
        PIXELS,
        "dropped, of another shape or form: image.projection",
        "initialized randomly: image.projection",
    ]
    for name, tensor in trainer.learner.model.image.state_dict().items():
        if not name.startswith("projection."):
            assert torch.equal(tensor, of_run.model[f"image.{name}"])
    trainer.close()
