"""Evaluation sets in addition to the run's data: metric names, caching of embeddings, robustness table, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import refusal
from helpers.color_model import RGB, Told, dataset, embedder
from helpers.runs import compose
from PIL import Image
from torch import Tensor

from clipx.config.saved import from_dict, to_dict
from clipx.data.csv import CsvSpec
from clipx.data.folder import FolderSpec
from clipx.data.spec import Classes, Dataset, DataSpec
from clipx.distributed.comm import Comm
from clipx.errors import ClipxError, ConfigError, DataError
from clipx.evaluator.base import Embedder
from clipx.evaluator.retrieval import RetrievalSpec
from clipx.evaluator.spec import EvaluatorSpec
from clipx.evaluator.suite import Suite
from clipx.evaluator.tables import robustness
from clipx.evaluator.zeroshot import ZeroShotSpec
from clipx.trainer.spec import RunSpec

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
    return Suite.open(evaluators, *(run_data() if with_run_data else (None, None)), ALONE)


def zeroshot(**sets: DataSpec) -> dict[str, EvaluatorSpec]:
    return {"zeroshot": ZeroShotSpec(kind="zeroshot", sets=sets)}


def test_metrics_of_a_set_carry_its_name_and_those_of_the_run_data_do_not(tmp_path: Path) -> None:
    suite = open_suite(zeroshot(right=correct_set(tmp_path / "a"), shifted=mislabelled_set(tmp_path / "b")))
    found = suite.evaluate(["zeroshot"], embedder())
    assert found["eval/zeroshot/top1"] == 0.75
    assert found["eval/zeroshot/right/top1"] == 1
    assert found["eval/zeroshot/shifted/top1"] == pytest.approx(2 / 3)
    assert next(iter(found)) == "eval/zeroshot/top1"


def test_only_the_requested_evaluators_run_and_sets_alone_need_no_held_out_data(tmp_path: Path) -> None:
    sets = {"right": correct_set(tmp_path / "a")}
    evaluators = {**zeroshot(), "retrieval": RetrievalSpec(kind="retrieval", held_out=False, sets=sets)}
    found = open_suite(evaluators).evaluate(["retrieval"], embedder())
    assert all(name.startswith("eval/retrieval/right/") for name in found)
    assert found["eval/retrieval/right/text_to_image/recall@1"] == 1


def count_embeddings(monkeypatch: pytest.MonkeyPatch, told: Embedder) -> dict[str, int]:
    counts = {"image": 0, "text": 0}
    for kind in counts:
        encode = getattr(told.model, f"encode_{kind}")

        def call(batch: Tensor, kind: str = kind, encode: Any = encode) -> Tensor:
            counts[kind] += len(batch)
            result: Tensor = encode(batch)
            return result

        monkeypatch.setattr(told.model, f"encode_{kind}", call)
    return counts


def test_shared_sets_and_shared_class_prompts_are_embedded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = correct_set(tmp_path / "a")
    again = FolderSpec(name="folder", path=str(tmp_path / "a"), workers=0)
    evaluators = {
        "zeroshot": ZeroShotSpec(
            kind="zeroshot", held_out=False, sets={"a": data, "b": mislabelled_set(tmp_path / "b")}
        ),
        "other": ZeroShotSpec(kind="zeroshot", held_out=False, sets={"a": again}),
    }
    suite = open_suite(evaluators)
    told = embedder()
    counts = count_embeddings(monkeypatch, told)
    suite.evaluate(["zeroshot", "other"], told)
    assert counts == {"image": 12, "text": 3}
    suite.evaluate(["zeroshot"], told)
    assert counts == {"image": 12, "text": 3}
    other = embedder()
    counts = count_embeddings(monkeypatch, other)
    suite.evaluate(["zeroshot"], other)
    assert counts == {"image": 12, "text": 3}, "other weights require new embeddings"


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


# ----------------------------------------------------------------------------------------------------- robustness


def test_the_robustness_table_has_averages_and_drops(tmp_path: Path) -> None:
    suite = open_suite(zeroshot(right=correct_set(tmp_path / "a"), shifted=mislabelled_set(tmp_path / "b")))
    numbers = suite.evaluate(["zeroshot"], embedder())
    rows = robustness(suite, numbers)["zeroshot"]
    assert list(rows) == ["mine", "right", "shifted", "average", "average of the others"]
    assert [row["top1"] for row in rows.values()] == pytest.approx([0.75, 1, 2 / 3, (0.75 + 1 + 2 / 3) / 3, 5 / 6])
    assert [row["drop"] for row in rows.values()] == pytest.approx([0, -0.25, 1 / 12, -1 / 18, -1 / 12])
    single = open_suite(zeroshot())
    assert robustness(single, single.evaluate(["zeroshot"], embedder())) == {}


# ---------------------------------------------------------------------------------------------------------- errors


def test_an_evaluator_without_data_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"evaluator.zeroshot has nothing to evaluate: give data=…, or a set with"):
        open_suite(zeroshot(), with_run_data=False)


def test_data_without_held_out_samples_raises_an_error_with_both_fixes() -> None:
    data, _ = run_data()
    nothing = dataset(colours=["red"], labels=[2], classes=CLASSES)
    with pytest.raises(DataError, match=r"needs held-out samples, .* train without .* or evaluate sets only"):
        Suite.open(zeroshot(), data, Dataset(nothing.train, None, CLASSES), ALONE)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: write_pictures(p, {"red": []}), DataError, "evaluator.zeroshot.sets.a.path=.*: the class folder red contains no image"),
        (lambda p: CsvSpec(name="x", path=str(p / "t.csv")), ConfigError, "needs labels, .*: give evaluator.zeroshot.sets.a.label_column"),
        (lambda p: write_pictures(p / "a", {"red": ["red"]}), ConfigError, "^evaluator.zeroshot.sets.a: .*names.txt has 3 names, but the data has 1 classes"),
    ],
    ids=["an empty class folder", "no labels", "another number of classes"],
)  # fmt: skip
def test_an_error_in_a_set_names_its_key(tmp_path: Path, make: Any, error: type[ClipxError], message: str) -> None:
    (tmp_path / "t.csv").write_text("filepath,caption\nred.png,red\n")
    Image.new("RGB", (10, 8), RGB["red"]).save(tmp_path / "red.png")
    data = make(tmp_path)
    (tmp_path / "names.txt").write_text("blue\ngreen\nred\n")
    spec = ZeroShotSpec(kind="zeroshot", classnames=f"{tmp_path}/names.txt", sets={"a": data})
    with pytest.raises(error, match=message) as raised:
        open_suite({"zeroshot": spec})
    assert "\n" not in str(raised.value)


def test_a_set_name_in_use_raises_an_error(tmp_path: Path) -> None:
    correct = correct_set(tmp_path / "a")
    for name in ("image_to_text", "mine", "average"):
        said = refusal(open_suite, {"retrieval": RetrievalSpec(kind="retrieval", sets={name: correct})})
        assert f"evaluator.retrieval.sets.{name} has a name that is already in use" in said, name
    few = dataset(colours=["red"], labels=[2], classes=Classes(CLASSES.names, CLASSES.templates, {"few": (1, 2)}))
    with pytest.raises(ConfigError, match="evaluator.zeroshot.sets.few has a name that is already in use"):
        Suite.open(zeroshot(few=correct), run_data()[0], few, ALONE)


# -------------------------------------------------------------------------------------------------- configuration


def test_sets_survive_overriding_saving_and_loading() -> None:
    typed = ("+data@evaluator.zeroshot.sets.v2=benchmark", "evaluator.zeroshot.sets.v2.path=/data/v2")
    spec = compose(*typed, "name=x")
    assert spec.evaluator["zeroshot"].sets["v2"].kind == "benchmark"
    assert set(spec.evaluator) == {"zeroshot", "retrieval"}, "a set does not select evaluators"
    assert from_dict(RunSpec, to_dict(spec)) == spec
