"""Metrics against clip_benchmark's functions, on the same set with the same model.

Ties are avoided where clip_benchmark leaves their order to topk and clipx counts them against the right answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from helpers.benchmark_set import write_set
from helpers.runs import compose
from helpers.samples import jpeg
from PIL import Image
from torch import Tensor

from clipx.data.shards.write import write_samples
from clipx.data.transform import eval_transform
from clipx.distributed.comm import Comm
from clipx.evaluator.base import Embedder
from clipx.evaluator.retrieval import DuplicateCaptions, RetrievalSpec
from clipx.evaluator.spec import EvaluatorSpec
from clipx.evaluator.suite import Suite
from clipx.evaluator.zeroshot import ZeroShotSpec
from clipx.extra.hf.benchmark import BenchmarkSpec
from clipx.precision.spec import Precision

CPU = torch.device("cpu")
ALONE = Comm(0, 1, 0, CPU)
SPEC = compose(
    "model.image.timm=vit_xsmall_patch16_clip_224",
    "+model.image.options={patch_size:16,embed_dim:32,depth:1,num_heads:2}",
    *("model.image.size=32", "model.text.width=32", "model.text.heads=2", "model.text.layers=1"),
).model
NAMES = ("owl", "eel", "fox", "ant", "emu", "yak", "cod")


class Theirs:
    """A model with the interface that clip_benchmark calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = SPEC.build(CPU, torch.float32).eval()
        self.tokenizer = SPEC.text.build_tokenizer()

    def encode_image(self, images: Tensor) -> Tensor:
        return self.model.encode_image(images)

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.model.encode_text(tokens)


class Loader(list[tuple[Tensor, object]]):
    """Batches of a set read by clip_benchmark, with the attributes that its functions use."""

    def __init__(self, folder: Path, batch: int = 5) -> None:
        self.dataset = build_wds_dataset("x", _pixels, "test", str(folder))
        samples = list(self.dataset)
        for start in range(0, len(samples), batch):
            images, rest = zip(*samples[start : start + batch], strict=True)
            told = torch.tensor(rest) if isinstance(rest[0], int) else list(rest)
            self.append((torch.stack(images), told))


def _pixels(image: Image.Image) -> Tensor:
    return torch.tensor(np.array(eval_transform(image.convert("RGB"), 32))).permute(2, 0, 1)


def ours(folder: Path, evaluator: EvaluatorSpec, theirs: Theirs) -> dict[str, float]:
    data = BenchmarkSpec(name="set", path=str(folder), workers=0)
    suite = Suite.open({"x": evaluator}, data, None, ALONE)
    precision = Precision(torch.float32, None, "cpu")
    embedder = Embedder.build(theirs.model, SPEC, data, ALONE, precision, lambda bad: None)
    return {name.removeprefix("eval/x/"): value for name, value in suite.evaluate(["x"], embedder).items()}


def classify_with_both(folder: Path, names: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics of clip_benchmark and clipx on a set of 56 images, under clip_benchmark's names."""
    images = {name: [jpeg(100 * i + j, 40, 36) for j in range(5 + i)] for i, name in enumerate(NAMES)}
    write_set(folder, images, ["a photo of a {c}.", "the {c}", "{c}"])
    (folder / "classnames.txt").write_text("\n".join(names))
    theirs, loader = Theirs(), Loader(folder)
    classes, templates = loader.dataset.classes, loader.dataset.templates
    expected = zeroshot_classification.evaluate(theirs, loader, theirs.tokenizer, classes, templates, "cpu", amp=False)
    found = ours(folder, ZeroShotSpec(kind="zeroshot", batch_size=8), theirs)
    called = {"acc1": "top1", "acc5": "top5", "mean_per_class_recall": "mean_per_class_recall"}
    return expected, {key: found[name] for key, name in called.items()}


def test_zero_shot_equals_clip_benchmark(tmp_path: Path) -> None:
    expected, found = classify_with_both(tmp_path, NAMES)
    assert found == pytest.approx(expected)
    assert 0 < expected["acc1"] < expected["acc5"] < 1


def write_captioned_set(folder: Path, captions: Sequence[str]) -> Path:
    samples = [
        {"__key__": f"s{i:03d}", "jpg": jpeg(i, 40, 36), "txt": text.encode()} for i, text in enumerate(captions)
    ]
    (folder / "test").mkdir()
    write_samples(str(folder / "test" / "0.tar"), samples)
    (folder / "test" / "nshards.txt").write_text("1")
    (folder / "dataset_type.txt").write_text("retrieval")
    return folder


def test_retrieval_with_several_captions_per_image_equals_clip_benchmark(tmp_path: Path) -> None:
    write_captioned_set(
        tmp_path, ["\n".join(f"{NAMES[i % 7]} number {i} {j}" for j in range(1 + i % 4)) for i in range(30)]
    )
    theirs = Theirs()
    expected = zeroshot_retrieval.evaluate(
        theirs, Loader(tmp_path), theirs.tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    found = ours(tmp_path, RetrievalSpec(kind="retrieval", batch_size=8), theirs)
    for k in (1, 5, 10):
        assert found[f"text_to_image/recall@{k}"] == pytest.approx(expected[f"image_retrieval_recall@{k}"])
        assert found[f"image_to_text/recall@{k}"] == pytest.approx(expected[f"text_retrieval_recall@{k}"])
    assert 0 < expected["image_retrieval_recall@10"] < 1


def exact_unit(key: Sequence[int]) -> Tensor:
    """Returns a unit vector drawn by `key` whose products with others like it are exact in float32.

    Its entries are ±1/2, ±1/4, … ±2^-12, three of each, and another 2^-12. All sums of products are multiples of 2^-24.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(repr(list(key)).encode()))
    sizes = torch.tensor([2.0**-level for level in range(1, 13) for _ in range(3)] + [2.0**-12])
    signs = torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1
    return (signs * sizes)[torch.randperm(len(sizes), generator=generator)]


class Exact(Theirs):
    """Gives each image and each text a vector, so that scores tie if and only if the images and texts are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.model.encode_image = self.encode_image  # type: ignore[method-assign]
        self.model.encode_text = self.encode_text  # type: ignore[method-assign]

    def encode_image(self, images: Tensor) -> Tensor:
        return torch.stack([exact_unit(image.flatten()[::7].tolist()) for image in images])

    def encode_text(self, tokens: Tensor) -> Tensor:
        return torch.stack([exact_unit(row.tolist()) for row in tokens])


REPEATED = [f"an {NAMES[i % 3]}\nAn  {NAMES[i % 3 + i % 2]}\nthe {NAMES[i % 7]} {i}" for i in range(56)]


def test_duplicate_captions_apart_equal_clip_benchmark(tmp_path: Path) -> None:
    """Captions occur twice on one image and on several images; with exact scores, only those of equal tokens tie.

    Each k of topk has another order of ties: the counts are equal because it is topk that chooses.
    """
    write_captioned_set(tmp_path, REPEATED)
    theirs = Exact()
    captions = [" ".join(text.lower().split()) for texts in REPEATED for text in texts.splitlines()]
    images = theirs.encode_image(torch.cat([batch for batch, _ in Loader(tmp_path)]))
    scores = images @ theirs.encode_text(theirs.tokenizer(captions)).T
    assert all(len(row.unique()) == len(set(captions)) < len(captions) for row in scores)
    assert any(len(set(captions[i : i + 3])) < 3 for i in range(0, len(captions), 3))

    expected = zeroshot_retrieval.evaluate(
        theirs, Loader(tmp_path), theirs.tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    apart = ours(tmp_path, RetrievalSpec(kind="retrieval", duplicate_captions=DuplicateCaptions.apart), theirs)
    merged = ours(tmp_path, RetrievalSpec(kind="retrieval"), theirs)
    for k in (1, 5, 10):
        for ours_, theirs_ in (("text_to_image", "image_retrieval"), ("image_to_text", "text_retrieval")):
            found = apart[f"{ours_}/recall@{k}"]
            assert found == pytest.approx(expected[f"{theirs_}_recall@{k}"], abs=1e-7)
    assert 0 < apart["image_to_text/recall@5"] < apart["image_to_text/recall@10"] < 1
    assert merged["text_to_image/recall@5"] != apart["text_to_image/recall@5"]
