"""A run with adapters: frozen weights, checkpoints, evaluation, export, further training, averages with its start."""

from __future__ import annotations

import io
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.runs import VIT, compose, small, tensors
from helpers.samples import jpeg
from PIL import Image
from transformers import CLIPModel

from clipx.export import export
from clipx.model.clip import CLIP
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_model, load_weights

CPU = torch.device("cpu")
SMALL = (*VIT, "model.image.size=32", "model.quick_gelu=true", "evaluator=[retrieval]", "evaluator.retrieval.every=end")
ADAPTERS = tuple(f"model.{side}.lora.{word}" for side in ("image", "text") for word in ("rank=4", "alpha=16"))
KINDS = {
    "lora": (*ADAPTERS, "model.text.lora.dropout=0.1"),
    "dora": (*ADAPTERS, "model.image.lora.dora=true", "model.text.lora.dora=true", "optimizer.ema_decay=0.5"),
}
STEPS = 4


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero") / "zero"
    Trainer(small(path, *SMALL, "duration=2st", "schedule.warmup=1st")).fit()
    return path


@pytest.fixture(scope="module")
def trained(zero: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trainer]:
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for kind, words in KINDS.items():
        found[kind] = Trainer(small(folder / kind, *SMALL, f"model.weights={zero}", "optimizer.lr=0.01", *words))
        found[kind].fit()
    return found


def evaluated(trainer: Trainer) -> CLIP:
    """Returns the model with adapters that the run evaluates: the average of the weights if there is one."""
    learner = trainer.learner
    return (learner.model if learner.average is None else learner.average.model).eval()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=random)
    texts = [f"a {colour} {form}" for colour in ("red", "green", "blue") for form in ("star", "disc")]
    return image, compose(*SMALL).model.text.build_tokenizer()(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_are_those_of_the_start_and_keep_their_names(
    kind: str, zero: Path, trained: dict[str, Trainer]
) -> None:
    before, after = tensors(zero, 2), tensors(trained[kind].rundir.path, STEPS)
    names = {name for name in before if name.startswith("model/")}
    assert names < after.keys()
    moved = {name.removeprefix("model/") for name in names if not torch.equal(before[name], after[name])}
    assert moved == {"image.projection.weight", "text.projection.weight", "text.norm.weight", "text.norm.bias"}
    states = {name.split("/")[1] for name in after if name.startswith("optimizer/model.")}
    adapters = {name for name in after if name.startswith("model/") and name not in before}
    assert states == {f"model.{name}" for name in moved} | {f"model.{name.removeprefix('model/')}" for name in adapters}
    if kind == "dora":
        fixed = [name for name in names - {f"model/{name}" for name in moved} if f"average/{name[6:]}" in after]
        assert fixed and all(torch.equal(after[name], after[f"average/{name[6:]}"]) for name in fixed)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_run_is_read_with_its_adapters_merged(kind: str, zero: Path, trained: dict[str, Trainer]) -> None:
    weights, spec, model = load_model(str(trained[kind].rundir.path), "run", CPU, torch.float32)
    assert not spec.has_adapters and weights.model.keys() == load_weights(str(zero)).model.keys()
    _, _, start = load_model(str(zero), "run", CPU, torch.float32)
    images, tokens_BL = samples()
    expected = evaluated(trained[kind])(images, tokens_BL)
    for found, wanted, first in zip(model(images, tokens_BL), expected, start(images, tokens_BL), strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
        assert (found - first).norm() > 0.05 * wanted.norm()


@torch.no_grad()
def test_open_clip_and_transformers_load_merged_weights(trained: dict[str, Trainer], tmp_path: Path) -> None:
    path = trained["dora"].rundir.path
    for form in ("open_clip", "hf"):
        export(compose(f"run={path}", f"out={tmp_path / form}", f"format={form}", config_name="export"))  # type: ignore[arg-type]
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}/open_clip")
    ours, (_, tokens_BL) = evaluated(trained["dora"]), samples()
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
