"""`clipx.score` writes the scores of every sample, and continues after a kill on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.runs import SMALL, VIT, compose
from PIL import Image

from clipx.data.transform import decode, eval_transform
from clipx.errors import ClipxError, ConfigError
from clipx.extra.curate.groups import duplicate_columns, semantic_columns
from clipx.extra.curate.samples import SIGNATURE
from clipx.extra.curate.score import score
from clipx.trainer.trainer import Trainer
from clipx.weights.load import load_into, load_weights, save_weights

TRAIN = (*SMALL, *VIT, "data.samples=64", "data.held_out_samples=16", "duration=2st", "schedule.warmup=1st")
DATA = ("data=shapes", "data.samples=64", "data.held_out_samples=16", "data.workers=0")
PARTS = ("samples_per_shard=24", "batch_size=10")
ALL = "scores=[similarity,aesthetic,caption,image,duplicates,entries,semantic]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("score") / "run"
    Trainer(compose(*TRAIN, f"run_dir={run_dir}")).fit()
    rng = np.random.default_rng(0)
    (run_dir / "entries.txt").write_text("circle\na red\nsmall\nnowhere\n")
    np.savez(run_dir / "head.npz", weight=rng.normal(size=(1, 128)), bias=np.array([0.5]))
    return run_dir


def options(trained: Path, out: Path) -> tuple[str, ...]:
    files = (f"head={trained}/head.npz", f"entries={trained}/entries.txt")
    return (*DATA, *PARTS, ALL, f"run={trained}", *files, "clusters=4", f"out={out}")


def scored(out: Path | str, *overrides: str) -> None:
    score(compose(f"out={out}", *overrides, config_name="score"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def uninterrupted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts of 64 samples, with all scores."""
    out = tmp_path_factory.mktemp("whole")
    score(compose(*options(trained, out), config_name="score"))  # type: ignore[arg-type]
    return out


def test_similarity_and_head_equal_the_definition(trained: Path, uninterrupted: Path) -> None:
    table = pq.read_table(uninterrupted / "scores.parquet")
    found = load_weights(str(trained))
    assert found.spec is not None
    model = found.spec.build(torch.device("cpu"), torch.float32).eval()
    load_into(model, found)
    source, tokenizer = compose(*TRAIN).data.open().train, found.spec.text.build_tokenizer()
    head, entries = np.load(trained / "head.npz"), (trained / "entries.txt").read_text().split("\n")[:-1]
    for index in range(0, 64, 9):
        sample = source.read(index)
        view = torch.tensor(eval_transform(decode(sample.image, 10**6), 48)).permute(2, 0, 1)[None]
        with torch.no_grad():
            image_D = model.encode_image(view)[0]
            expected = (model.encode_text(tokenizer(sample.captions)) @ image_D).mean().item()
        assert table["similarity"][index].as_py() == pytest.approx(expected, abs=1e-5)
        assert table["aesthetic"][index].as_py() == pytest.approx(head["weight"][0] @ image_D.numpy() + 0.5, abs=1e-4)
        stored = np.load(uninterrupted / f"{index // 24:05d}.embeddings.npy")[index % 24]
        np.testing.assert_allclose(stored, image_D.numpy(), atol=1e-3)
        longest = max(sample.captions, key=len)
        assert table["characters"][index].as_py() == len(longest)
        assert table["captions"][index].as_py() == len(sample.captions)
        assert table["key"][index].as_py() == source.key(index)
        texts = [f" {text} " for text in sample.captions]
        contained = [n for n, entry in enumerate(entries) if any(f" {entry} " in text for text in texts)]
        assert table["entries"][index].as_py() == contained
        assert (table["width"][index].as_py(), table["script"][index].as_py()) == (48, "Latin")
    assert table["index"].to_pylist() == list(range(64))
    assert table["reason"].null_count == 64
    found_entries = [number for numbers in table["entries"].to_pylist() for number in numbers]
    counts = pq.read_table(uninterrupted / "entries.parquet").to_pydict()
    assert counts == {"entry": entries, "count": [found_entries.count(number) for number in range(4)]}
    assert pq.ParquetFile(uninterrupted / "scores.parquet").num_row_groups == 3


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Eight images: 3 and 5 are copies of 0, 6 is a smaller copy of 1, 4 is damaged, 7 is of one colour."""
    rows, rng = ["filepath,caption"], np.random.default_rng(0)
    for index in range(8):
        path = tmp_path / f"{index}.png"
        areas = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(areas).resize((300, 200), Image.Resampling.BICUBIC)
        image.save(path)
        rows.append(f"{index}.png,Картинка {index}" if index == 2 else f"{index}.png,picture {index}")
    for copy in (3, 5):
        (tmp_path / f"{copy}.png").write_bytes((tmp_path / "0.png").read_bytes())
    Image.open(tmp_path / "1.png").resize((150, 100)).save(tmp_path / "6.png")
    (tmp_path / "4.png").write_bytes(b"no image")
    Image.new("RGB", (60, 20)).save(tmp_path / "7.png")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    return tmp_path


def csv(pairs: Path) -> tuple[str, ...]:
    return ("data=csv", f"data.path={pairs}/pairs.csv", "data.held_out_share=0", "data.workers=0")


def test_duplicates_are_found_exactly_and_bad_samples_have_a_reason(pairs: Path) -> None:
    scored(pairs / "out", *csv(pairs), "samples_per_shard=3")
    table = pq.read_table(pairs / "out" / "scores.parquet")
    assert table["duplicate_of"].to_pylist() == [None, None, None, 0, None, 0, None, None]
    assert table["near_duplicate_of"].to_pylist() == [None, None, None, 0, None, 0, 1, None]
    assert table["script"].to_pylist() == ["Latin", "Latin", "Cyrillic", "Latin", None, "Latin", "Latin", "Latin"]
    bad = table.slice(4, 1).to_pylist()[0]
    assert "PNG" in bad["reason"] or "image" in bad["reason"]
    assert all(value is None for name, value in bad.items() if name not in ("index", "key", "reason"))
    assert (table["width"][0].as_py(), table["shorter_side"][0].as_py(), table["aspect_ratio"][0].as_py()) == (
        300, 200, 1.5,
    )  # fmt: skip
    assert table["entropy"][7].as_py() == 0
    with Image.open(pairs / "2.png") as image:
        counts = np.bincount(np.asarray(image.convert("L")).ravel()) / (300 * 200)
    expected = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum()
    assert table["entropy"][2].as_py() == pytest.approx(expected, rel=1e-5)


def test_duplicates_have_the_index_of_the_first_one() -> None:
    """The index of a sample is not its place in the table, which lacks the held-out samples."""
    signatures = np.zeros(2, SIGNATURE)
    signatures["index"] = 0, 2
    columns = duplicate_columns(signatures, np.array([10, 12, 15]))
    for name in ("duplicate_of", "near_duplicate_of"):
        assert columns[name].to_pylist() == [None, None, 10]


def test_cosines_of_clusters_equal_a_loop_over_pairs() -> None:
    rng = np.random.default_rng(1)
    image_ND = rng.normal(size=(60, 5))
    image_ND /= np.linalg.norm(image_ND, axis=1, keepdims=True)
    image_ND[40] = image_ND[7]
    image_ND[3] = np.nan
    columns = {k: v.to_pylist() for k, v in semantic_columns(image_ND.astype(np.float16), 5, 0, torch.device("cpu")).items()}  # fmt: skip
    assert columns["cluster"][3] is columns["semantic_similarity"][3] is None
    half = image_ND.astype(np.float16).astype(np.float64)
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    for number in range(60):
        if number == 3:
            continue
        place = (columns["cluster_similarity"][number], number)
        earlier = [
            half[number] @ half[other]
            for other in range(60)
            if columns["cluster"][other] == columns["cluster"][number]
            and (columns["cluster_similarity"][other], other) < place
        ]
        assert columns["semantic_similarity"][number] == pytest.approx(max(earlier, default=-1), abs=1e-5)
    assert columns["semantic_similarity"][40] == pytest.approx(1, abs=1e-5)


def test_another_plan_other_weights_and_another_head_are_errors(
    trained: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"holds other scores \(.*scores was .*, is \['caption'\]"):
        scored(uninterrupted, *DATA, *PARTS, "scores=[caption]")
    found = load_weights(str(trained))
    other = replace(found, model={name: tensor + 1 for name, tensor in found.model.items()})
    save_weights(tmp_path / "other.safetensors", other, None)
    words = [word for word in options(trained, uninterrupted) if not word.startswith(("run=", "out="))]
    with pytest.raises(ConfigError, match=r"holds other scores \(weights was "):
        scored(uninterrupted, *words, f"run={tmp_path}/other.safetensors")
    np.savez(tmp_path / "head.npz", weight=np.ones(7), bias=np.ones(1))
    (tmp_path / "text.pt").write_text("none")
    for name, message in (
        ("head.npz", "has a weight of 7"),
        ("text.pt", "cannot be read"),
        ("no.npz", "cannot be read"),
    ):
        with pytest.raises(ClipxError, match=message):
            scored(tmp_path / "out", *DATA, "scores=[aesthetic]", f"run={trained}", f"head={tmp_path}/{name}")
    assert json.loads((uninterrupted / "manifest.json").read_text())["usable"] == 64
