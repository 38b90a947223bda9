"""Exported models load in unmodified open_clip and transformers with equal outputs, adapters merged."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import open_clip
import pytest
import torch
from helpers.benchmark_set import write_set
from helpers.open_clip_models import filled
from helpers.runs import VIT, compose, run, small
from helpers.samples import jpeg
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, pipeline

from clipx.checkpoint.format import CheckpointDir
from clipx.checkpoint.state import load_module, select_prefix
from clipx.data.shapes import SHAPES
from clipx.data.transform import decode, eval_transform
from clipx.errors import CheckpointError
from clipx.export import export
from clipx.model.clip import CLIP
from clipx.model.tower_spec import Interpolation
from clipx.trainer.saved_run import open_run
from clipx.trainer.trainer import Trainer
from clipx.weights.export import atomic_output
from clipx.weights.load import load_model, load_weights

CPU = torch.device("cpu")
TEXTS = [
    "a photo of a cat",
    "two green stars, dotted; on a brown background",
    "",
    "naïve Ünïcode & <b>html</b> 123 " * 9,
    "“a dog’s life” – ‘the best’ of caf&eacute;s",
]
PIXELS = ("model.image.mean=[0.5,0.45,0.4]", "model.image.std=[0.25,0.26,0.3]")
OPTIONS = {
    "vit": (
        *VIT,
        *PIXELS,
        "model.image.size=32",
        "model.quick_gelu=true",
        "optimizer.ema_decay=0.5",
        "checkpoint.every=2st",
    ),
    "tiny": ("objective=siglip",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trains two runs: a ViT in CLIP's form, and timm's ResNet with SigLIP's loss."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in OPTIONS.items():
        Trainer(small(folder / name, *options)).fit()
    return {name: folder / name for name in OPTIONS}


def exported(run_dir: Path, out: Path, *options: str) -> Path:
    """Exports a run by the command's function. Returns the folder."""
    export(compose(f"run={run_dir}", f"out={out}", *options, config_name="export"))  # type: ignore[arg-type]
    return out


def trained(run_dir: Path, which: str = "model") -> CLIP:
    """Returns a run's final model: `model` or `average`."""
    found = CheckpointDir(run_dir / "checkpoints", print).load()
    assert found is not None
    model = open_run(str(run_dir)).spec.model.build(CPU, torch.float32).eval()
    load_module(model, select_prefix(which, found.tensors), which)
    return model


def tokens(run_dir: Path) -> Tensor:
    return open_run(str(run_dir)).spec.model.text.build_tokenizer()(TEXTS)


def pixels(
    image: bytes, size: int, stretch: bool = False, interpolation: Interpolation = Interpolation.bicubic
) -> Tensor:
    """Returns an image as clipx evaluates it, [1, 3, S, S]."""
    view = eval_transform(decode(image, 1 << 20), size, stretch, interpolation)
    return torch.from_numpy(view.copy()).permute(2, 0, 1)[None]


# -------------------------------------------------------------------------------------------------- open_clip


@pytest.mark.parametrize(("name", "which"), [("vit", "average"), ("tiny", "model")])
@torch.inference_mode()
def test_open_clip_loads_an_export_with_equal_embeddings(
    runs: dict[str, Path], tmp_path: Path, name: str, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(runs[name], tmp_path / "out", "format=open_clip")
    said = capsys.readouterr().out
    assert f'open_clip.create_model_and_transforms("local-dir:{tmp_path}/out")' in said
    assert ("the moving average of its weights" in said) == (which == "average")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}/out")
    theirs.eval()
    ours = trained(runs[name], which)
    own_tokens = tokens(runs[name])
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{tmp_path}/out")(TEXTS), own_tokens)
    text_BD, own_BD = theirs.encode_text(own_tokens, normalize=True), ours.encode_text(own_tokens)
    torch.testing.assert_close(text_BD, own_BD, atol=1e-5, rtol=0)
    for seed, (width, height) in enumerate([(61, 47), (40, 90), (48, 32), (53, 33)]):
        image = jpeg(seed, width, height)
        image_BD = theirs.encode_image(transform(Image.open(io.BytesIO(image)))[None], normalize=True)
        own_BD = ours.encode_image(pixels(image, ours.image.sizes[0]))
        torch.testing.assert_close(image_BD, own_BD, atol=1e-5, rtol=0)
    learned = objective(runs[name])
    assert theirs.logit_scale.item() == learned["temperature.log_scale"].item()
    assert (theirs.logit_bias is not None) == (name == "tiny")
    assert name != "tiny" or theirs.logit_bias.item() == learned["bias"].item() != -10


def objective(run_dir: Path) -> Mapping[str, Tensor]:
    found = CheckpointDir(run_dir / "checkpoints", print).load()
    assert found is not None
    return select_prefix("objective", found.tensors)


# ----------------------------------------------------------------------------------------------- transformers


@torch.inference_mode()
def test_transformers_loads_an_export_with_equal_embeddings(runs: dict[str, Path], tmp_path: Path) -> None:
    out = exported(runs["vit"], tmp_path / "out", "format=hf", "weights=trained")
    theirs, loaded = CLIPModel.from_pretrained(out, output_loading_info=True)
    assert not any(loaded.values()), "a key is missing, unexpected or has another shape"
    processor = CLIPProcessor.from_pretrained(out)
    ours = trained(runs["vit"]).eval()
    own_tokens = tokens(runs["vit"])
    given = processor.tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
    for row, own in zip(given["input_ids"].tolist(), own_tokens.tolist(), strict=True):
        assert row[: row.index(49407) + 1] == own[: own.index(49407) + 1]
    image = jpeg(1, 61, 47)
    exact = CLIPImageProcessorPil.from_pretrained(out)(Image.open(io.BytesIO(image)), return_tensors="pt")
    both = theirs(pixel_values=exact["pixel_values"], **given)
    torch.testing.assert_close(both.image_embeds, ours.encode_image(pixels(image, 32)), atol=1e-5, rtol=0)
    torch.testing.assert_close(both.text_embeds, ours.encode_text(own_tokens), atol=1e-5, rtol=0)
    assert theirs.logit_scale.item() == objective(runs["vit"])["temperature.log_scale"].item()
    alone = pipeline("zero-shot-image-classification", model=str(out))
    labels = alone(Image.open(io.BytesIO(image)), candidate_labels=["a dog’s life", "a cat"])
    assert alone.tokenizer(TEXTS[-1])["input_ids"] == processor.tokenizer(TEXTS[-1])["input_ids"] and len(labels) == 2
    fast = processor(images=Image.open(io.BytesIO(image)), return_tensors="pt")["pixel_values"]
    level = 1 / 255 / min(open_run(str(runs["vit"])).spec.model.image.normalization["std"])
    assert (fast - exact["pixel_values"]).abs().max() < 1.01 * level, (
        "differs by more than the rounding of torchvision's resize"
    )


@pytest.mark.slow
@torch.inference_mode()
def test_weights_that_are_no_runs_are_exported(runs: dict[str, Path], tmp_path: Path) -> None:
    """A file of open_clip's trainer with the model from the command line, then the result, back to open_clip."""
    exported(runs["vit"], tmp_path / "model", "format=open_clip")
    theirs = filled(open_clip.create_model(f"local-dir:{tmp_path}/model")).eval()
    theirs.logit_scale.fill_(3.3)
    state = {f"_orig_mod.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"state": {}}}, tmp_path / "epoch_3.pt")
    model = [word for word in OPTIONS["vit"] if word.startswith("model.")]
    hf = exported(tmp_path / "epoch_3.pt", tmp_path / "hf", "format=hf", "model=tiny", *model)
    twin = CLIPModel.from_pretrained(hf).eval()
    inputs = torch.rand(1, 3, 32, 32), tokens(runs["vit"])[:1]
    both = twin(pixel_values=inputs[0], input_ids=inputs[1])
    torch.testing.assert_close(both.image_embeds, theirs.encode_image(inputs[0], normalize=True), atol=1e-5, rtol=0)
    torch.testing.assert_close(both.text_embeds, theirs.encode_text(inputs[1], normalize=True), atol=1e-5, rtol=0)
    assert twin.logit_scale.item() == theirs.logit_scale.item()
    back = open_clip.create_model(f"local-dir:{exported(hf, tmp_path / 'back', 'format=open_clip')}").state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


def test_a_failed_export_leaves_no_incomplete_folder(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_output(tmp_path / "out") as folder:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            raise CheckpointError("half")

    with pytest.raises(CheckpointError, match="half"):
        fail()
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------- adapters

DORA = tuple(f"model.{side}.lora.{word}" for side in ("image", "text") for word in ("rank=4", "alpha=16", "dora=true"))


@pytest.fixture(scope="module")
def adapted(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CLIP]:
    """A run that trains adapters of the run `vit`, and its model with adapters."""
    words = (*DORA, *OPTIONS["vit"], f"model.weights={runs['vit']}", "optimizer.lr=0.01")
    trainer = Trainer(small(tmp_path_factory.mktemp("adapted") / "run", *words))
    trainer.fit()
    assert trainer.learner.average is not None
    return trainer.run.dir.path, trainer.learner.average.model.eval()


@torch.inference_mode()
def test_a_run_is_read_with_its_adapters_merged(runs: dict[str, Path], adapted: tuple[Path, CLIP]) -> None:
    run_dir, ours = adapted
    weights, spec, model = load_model(str(run_dir), "run", CPU, torch.float32)
    assert not spec.has_adapters and weights.model.keys() == load_weights(str(runs["vit"])).model.keys()
    _, _, start = load_model(str(runs["vit"]), "run", CPU, torch.float32)
    inputs = pixels(jpeg(1, 61, 47), 32), tokens(run_dir)
    for found, wanted, first in zip(model(*inputs), ours(*inputs), start(*inputs), strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
        assert (found - first).norm() > 0.05 * wanted.norm()


@torch.inference_mode()
def test_open_clip_and_transformers_load_merged_weights(adapted: tuple[Path, CLIP], tmp_path: Path) -> None:
    run_dir, ours = adapted
    tokens_BL, image = tokens(run_dir), jpeg(1, 61, 47)
    own_BD = ours.encode_text(tokens_BL)
    out = exported(run_dir, tmp_path / "open_clip", "format=open_clip")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{out}")
    torch.testing.assert_close(theirs.eval().encode_text(tokens_BL, normalize=True), own_BD, atol=1e-5, rtol=0)
    found_BD = theirs.encode_image(transform(Image.open(io.BytesIO(image)))[None], normalize=True)
    torch.testing.assert_close(found_BD, ours.encode_image(pixels(image, 32)), atol=1e-5, rtol=0)
    hugging = CLIPModel.from_pretrained(exported(run_dir, tmp_path / "hf", "format=hf")).eval()
    features = hugging.get_text_features(tokens_BL)
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    torch.testing.assert_close(torch.nn.functional.normalize(features, dim=1), own_BD, atol=1e-5, rtol=0)


def test_clip_benchmark_and_clipx_report_equal_numbers(runs: dict[str, Path], tmp_path: Path) -> None:
    images = {shape: [jpeg(10 * i + j, 40 + j, 50) for j in range(9)] for i, shape in enumerate(SHAPES)}
    write_set(tmp_path / "set", images, ["a {c}", "a drawing of a {c}."])
    exported(runs["tiny"], tmp_path / "out", "format=open_clip")
    words = ("--dataset", "wds/shapes", "--dataset_root", str(tmp_path / "set"), "--no_amp", "--num_workers", "0")
    model = ("--model_type", "open_clip", "--model", f"local-dir:{tmp_path}/out", "--output", f"{tmp_path}/found.json")
    run(sys.executable, "-m", "clip_benchmark.cli", "eval", *words, *model)
    theirs = json.loads((tmp_path / "found.json").read_text())["metrics"]
    evaluate = (sys.executable, "-m", "clipx.evaluate", "data=benchmark", "evaluator=[zeroshot]", "data.workers=0")
    shutil.copytree(runs["tiny"], tmp_path / "run")
    run(*evaluate, f"run={tmp_path}/run", f"data.path={tmp_path}/set")
    (path,) = (tmp_path / "run").glob("evaluation-*.json")
    ours = json.loads(path.read_text())
    names = {"acc1": "top1", "acc5": "top5", "mean_per_class_recall": "mean_per_class_recall"}
    assert {key: ours[f"eval/zeroshot/{name}"] for key, name in names.items()} == pytest.approx(theirs)
