"""A run with adapters is read and exported with them merged."""

from __future__ import annotations

import io
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.runs import VIT, compose, small
from helpers.samples import jpeg
from PIL import Image
from transformers import CLIPModel

from clipx.export import export
from clipx.model.clip import CLIP
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_model, load_weights

CPU = torch.device("cpu")
SMALL = (*VIT, "model.image.size=32", "model.quick_gelu=true", "evaluator=[retrieval]", "evaluator.retrieval.every=end")
DORA = tuple(f"model.{side}.lora.{word}" for side in ("image", "text") for word in ("rank=4", "alpha=16", "dora=true"))


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero") / "zero"
    Trainer(small(path, *SMALL, "duration=2st", "schedule.warmup=1st")).fit()
    return path


@pytest.fixture(scope="module")
def trained(zero: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    words = (*DORA, f"model.weights={zero}", "optimizer.lr=0.01", "optimizer.ema_decay=0.5")
    trainer = Trainer(small(tmp_path_factory.mktemp("runs") / "dora", *SMALL, *words))
    trainer.fit()
    return trainer


def evaluated(trainer: Trainer) -> CLIP:
    """Returns the model with adapters that the run evaluates: the average of the weights."""
    assert trainer.learner.average is not None
    return trainer.learner.average.model.eval()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=random)
    texts = [f"a {colour} {form}" for colour in ("red", "green", "blue") for form in ("star", "disc")]
    return image, compose(*SMALL).model.text.build_tokenizer()(texts)


@torch.no_grad()
def test_a_run_is_read_with_its_adapters_merged(zero: Path, trained: Trainer) -> None:
    weights, spec, model = load_model(str(trained.rundir.path), "run", CPU, torch.float32)
    assert not spec.has_adapters and weights.model.keys() == load_weights(str(zero)).model.keys()
    _, _, start = load_model(str(zero), "run", CPU, torch.float32)
    images, tokens_BL = samples()
    expected = evaluated(trained)(images, tokens_BL)
    for found, wanted, first in zip(model(images, tokens_BL), expected, start(images, tokens_BL), strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
        assert (found - first).norm() > 0.05 * wanted.norm()


@torch.no_grad()
def test_open_clip_and_transformers_load_merged_weights(trained: Trainer, tmp_path: Path) -> None:
    path = trained.rundir.path
    for form in ("open_clip", "hf"):
        export(compose(f"run={path}", f"out={tmp_path / form}", f"format={form}", config_name="export"))  # type: ignore[arg-type]
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}/open_clip")
    ours, (_, tokens_BL) = evaluated(trained), samples()
    own_BD = ours.encode_text(tokens_BL)
    text_BD = theirs.eval().encode_text(tokens_BL, normalize=True)
    torch.testing.assert_close(text_BD, own_BD, atol=1e-5, rtol=0)
    picture = transform(Image.open(io.BytesIO(jpeg(1, 32, 32))))[None]
    found_BD = theirs.encode_image(picture, normalize=True)
    torch.testing.assert_close(found_BD, ours.encode_image(picture * ours.std_C11 + ours.mean_C11), atol=1e-5, rtol=0)
    hugging = CLIPModel.from_pretrained(tmp_path / "hf").eval()
    features = hugging.get_text_features(tokens_BL)
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    torch.testing.assert_close(torch.nn.functional.normalize(features, dim=1), own_BD, atol=1e-5, rtol=0)
