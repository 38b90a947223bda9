"""Runs whose towers start from weights of timm, transformers and CLIP models: ranks, sharding, resume, export, LiT."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from helpers.hf_models import save_config, save_tokenizer
from helpers.open_clip_models import filled
from helpers.runs import VIT, compose, interrupt, small, tensors
from numpy.typing import NDArray
from safetensors.torch import load_file

from clipx.data.transform import decode, eval_transform
from clipx.embed import embed
from clipx.export import export
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_weights

SIZE, DEPTH = 48, {"depth": 2, "embed_dim": 48, "num_heads": 4}
TOWER = ("model.image.timm=vit_tiny_patch16_224", "model.image.options={depth:2,embed_dim:48,num_heads:4}", *VIT[2:])
MEAN, STD = [0.4, 0.5, 0.45], [0.25, 0.2, 0.3]
PIXELS = "pixels are normalized by mean=[0.4,0.5,0.45] std=[0.25,0.2,0.3], as in the training of these weights"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a timm model, as timm.models.save_for_hf writes it."""
    folder = tmp_path_factory.mktemp("weights") / "vit"
    model = filled(timm.create_model("vit_tiny_patch16_224", img_size=SIZE, **DEPTH))
    model.pretrained_cfg |= {"mean": MEAN, "std": STD}
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return folder


def test_a_locked_trunk_remains_that_of_timm_and_resumes_bit_for_bit(weights: Path, tmp_path: Path) -> None:
    words = (*TOWER, "model.image.lock=all", "model.image.projection=none", "model.embed_dim=48")
    words += ("checkpoint.every=2st", "duration=4st", "model.image.options.drop_path_rate=0.5")
    place = f"model.image.weights={weights}"
    Trainer(small(tmp_path / "whole", *words, place)).fit()
    interrupt(Trainer(small(tmp_path / "parts", *words, place)), 3)
    Trainer(small(tmp_path / "parts", *words, "model.image.weights=/gone", "resume=auto")).fit()
    whole, parts = (tensors(tmp_path / which, 4) for which in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    for name, tensor in load_file(weights / "model.safetensors").items():
        if not name.startswith("head."):
            assert torch.equal(whole[f"model/image.trunk.{name}"], tensor)


def test_a_run_is_exported_without_its_sources_and_starts_a_tower(weights: Path, tmp_path: Path) -> None:
    words = (*TOWER, f"model.image.weights={weights}", "model.image.lock=0", "model.image.head_blocks=1")
    Trainer(small(tmp_path / "run", *words)).fit()
    out = tmp_path / "out.safetensors"
    export(compose(f"run={tmp_path / 'run'}", "format=safetensors", f"out={out}", config_name="export"))  # type: ignore[arg-type]
    found, of_run = load_weights(str(out)), load_weights(str(tmp_path / "run"))
    assert found.spec is not None and found.spec.tower_weights == {}
    assert found.model.keys() == of_run.model.keys()
    other = (*TOWER, f"model.image.weights={out}", "model.embed_dim=24", "model.image.head_blocks=1")
    trainer = Trainer(small(tmp_path / "other", *other))
    assert trainer.loaded_weights[1:] == [
        PIXELS,
        "dropped, of another shape or form: image.projection",
        "initialized randomly: image.projection",
    ]
    for name, tensor in trainer.learner.model.image.state_dict().items():
        if not name.startswith("projection."):
            assert torch.equal(tensor, of_run.model[f"image.{name}"])
    trainer.close()


def test_a_text_tower_of_transformers_is_locked_and_trained_upon(tmp_path: Path) -> None:
    source = save_config(tmp_path / "model", "xlm-roberta")
    save_tokenizer(tmp_path / "model")
    twin = filled(transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(source)))
    twin.save_pretrained(tmp_path / "model")
    words = ("model/text=hf", "model.text.context_length=24", f"model.text.source={source}", "model.text.lock=0")
    trainer = Trainer(small(tmp_path / "run", *VIT[:2], *words, f"model.text.weights={source}", "distributed=fsdp"))
    assert trainer.loaded_weights[0] == f"text tower: {source}"
    trainer.fit()
    state, trained_text = twin.state_dict(), tensors(tmp_path / "run", 4)
    names = [name for name in state if f"model/text.transformer.{name}" in trained_text]
    assert len(names) > 40
    for name in names:
        assert torch.equal(trained_text[f"model/text.transformer.{name}"], state[name]), name


# -------------------------------------------------------------------------------------- features of an image tower alone


def embedded(weights: Path, out: Path, *words: str) -> None:
    embed(compose(f"run={weights}", f"out={out}", "format=webdataset", *words, config_name="embed"))


DATA = ("data=shapes", "data.samples=64", "data.held_out_samples=16", "data.workers=0")


def test_stored_features_of_an_image_tower_alone_are_those_of_timm(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded(weights, tmp_path / "trunk", *DATA, "features=trunk")
    embedded(weights, tmp_path / "embedding", *DATA)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"model.image.features=48 data=webdataset data.shards='{tmp_path}/embedding/*.tar'" in printed
    trunk, embedding = (stored(tmp_path / name) for name in ("trunk", "embedding"))
    np.testing.assert_allclose(embedding, trunk / np.linalg.norm(trunk, axis=1, keepdims=True), atol=1e-6)
    twin = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=0, **DEPTH).eval()
    state = load_file(weights / "model.safetensors")
    twin.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("head.")})
    source = compose(*DATA).data.open().train
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    assert len(trunk) == 64
    for index in range(0, 64, 9):
        view = torch.tensor(eval_transform(decode(source.read(index).image, 10**6), SIZE)).permute(2, 0, 1)[None]
        with torch.no_grad():
            expected = twin((view / 255 - mean) / std)[0]
        torch.testing.assert_close(torch.tensor(trunk[index]), expected, rtol=1e-4, atol=1e-4)


def stored(folder: Path) -> NDArray[np.float32]:
    """Returns the features of all samples, in order."""
    rows = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".npy"):
                    file = tar.extractfile(member)
                    assert file is not None
                    rows.append(np.load(io.BytesIO(file.read())))
    return np.stack(rows)
