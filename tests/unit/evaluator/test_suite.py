"""Evaluations: further sets, their table of robustness, sample predictions, and the metrics read from their files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.color_model import RGB, Told, dataset, embedder
from PIL import Image

from clipx.data.folder import FolderSpec
from clipx.data.spec import Classes, Dataset, DataSpec
from clipx.distributed.comm import Comm
from clipx.errors import DataError
from clipx.evaluator.predictions import PredictionWriter
from clipx.evaluator.retrieval import RetrievalSpec
from clipx.evaluator.spec import EvaluatorSpec
from clipx.evaluator.suite import Suite
from clipx.evaluator.tables import robustness
from clipx.evaluator.zeroshot import ZeroShotSpec
from clipx.extra.check.recorded import recorded_metrics

ALONE = Comm(0, 1, 0, torch.device("cpu"))
CLASSES = Classes(("blue", "green", "red"), ("{}",))


def write_pictures(place: Path, shown: dict[str, list[str]]) -> DataSpec:
    """Writes class folders of plain PNG images in the given colours."""
    for name, colours in shown.items():
        (place / name).mkdir(parents=True)
        for i, colour in enumerate(colours):
            Image.new("RGB", (10, 8), RGB[colour]).save(place / name / f"{i}.png")
    return FolderSpec(name="folder", path=str(place), workers=0)


def correct_set(place: Path) -> DataSpec:
    return write_pictures(place, {name: [name] * 2 for name in RGB})


def mislabelled_set(place: Path) -> DataSpec:
    """Returns a set in which blue pictures are labelled red."""
    return write_pictures(place, {"blue": ["blue"] * 2, "green": ["green"] * 2, "red": ["blue"] * 2})


def run_data() -> tuple[DataSpec, Dataset]:
    data = dataset(colours=["red", "green", "blue", "red"], labels=[2, 1, 0, 1], classes=CLASSES)
    return FolderSpec(name="mine", workers=0), data


def open_suite(evaluators: dict[str, EvaluatorSpec], with_run_data: bool = True) -> Suite:
    spec, data = run_data() if with_run_data else (None, None)
    return Suite.open(evaluators, spec, data, ALONE)


def zeroshot(**sets: DataSpec) -> dict[str, EvaluatorSpec]:
    return {"zeroshot": ZeroShotSpec(kind="zeroshot", sets=sets)}


def test_different_sets_with_equal_fingerprints_are_not_confused(tmp_path: Path) -> None:
    """The fingerprints depend on file names, which are equal."""
    a, b = correct_set(tmp_path / "a"), mislabelled_set(tmp_path / "b")
    suite = open_suite(zeroshot(a=a, b=b))
    first, second = suite.sources
    assert first.fingerprint == second.fingerprint
    found = suite.evaluate(["zeroshot"], embedder())
    assert found["eval/zeroshot/a/top1"] != found["eval/zeroshot/b/top1"]


def test_bad_images_of_a_set_are_reported_and_its_limit_is_named(tmp_path: Path) -> None:
    data = correct_set(tmp_path / "a")
    (tmp_path / "a" / "red" / "1.png").write_bytes(b"no image")
    told = Told()
    with pytest.raises(DataError, match=r"1 of 6 .* more than evaluator.zeroshot.sets.a.max_bad_share=0.1"):
        open_suite(zeroshot(a=data)).evaluate(["zeroshot"], embedder(told, max_bad_share=0.5))
    assert [bad.key for bad in told.bad] == [str(tmp_path / "a" / "red" / "1.png")]


def test_the_robustness_table_has_averages_and_drops(tmp_path: Path) -> None:
    suite = open_suite(zeroshot(right=correct_set(tmp_path / "a"), shifted=mislabelled_set(tmp_path / "b")))
    numbers = suite.evaluate(["zeroshot"], embedder())
    rows = robustness(suite, numbers)["zeroshot"]
    assert list(rows) == ["mine", "right", "shifted", "average", "average of the others"]
    assert [row["top1"] for row in rows.values()] == pytest.approx([0.75, 1, 2 / 3, (0.75 + 1 + 2 / 3) / 3, 5 / 6])
    assert [row["drop"] for row in rows.values()] == pytest.approx([0, -0.25, 1 / 12, -1 / 18, -1 / 12])
    single = open_suite(zeroshot())
    assert robustness(single, single.evaluate(["zeroshot"], embedder())) == {}


def test_pictures_are_of_their_samples_also_behind_bad_ones(tmp_path: Path) -> None:
    colours = [None, "red", "green", None, "blue", "green"]
    labels = [0, 0, 1, 0, 2, 1]
    tool = embedder(max_bad_share=0.5)
    tool.compared = PredictionWriter(tmp_path, 0, active=True)
    data = dataset(colours, labels, Classes(tuple(RGB), ("{}",)))
    RetrievalSpec(kind="retrieval").evaluate(tool, data)
    ZeroShotSpec(kind="zeroshot").evaluate(tool, data)
    for what in ("captions", "classes"):
        samples = json.loads((tmp_path / f"predictions-{what}.json").read_text(encoding="utf-8"))["samples"]
        assert sorted(sample["answers"][0]["text"] for sample in samples) == ["blue", "green", "green", "red"]
        for sample in samples:
            picture = Image.open(io.BytesIO(base64.b64decode(sample["picture"])))
            colour = np.asarray(picture.convert("RGB"), dtype=float).mean((0, 1))
            assert np.abs(colour - RGB[sample["answers"][0]["text"]]).max() < 5
            assert sample["answers"][0]["right"]


def test_sets_alone_and_evaluations_of_several_steps_are_read(tmp_path: Path) -> None:
    values = {step: {"eval/z/imagenet/top1": step / 10, f"eval/z/only_{step}/top1": 1.0} for step in (2, 4)}
    models = [{"model": "m", "step": step, **values[step]} for step in values]
    (tmp_path / "evaluation-sets.json").write_text(json.dumps({"data": "sets", "models": models}))
    found = recorded_metrics(tmp_path, 4, "shapes")
    assert {name: one.value for name, one in found.items()} == values[4]
