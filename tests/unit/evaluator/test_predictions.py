"""Sample predictions of an evaluation: choice, ranks, pictures, and what leaves no file."""

from __future__ import annotations

import base64
import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import slow_except
from helpers.color_model import RGB, dataset, embedder
from helpers.ranks import Ranks
from helpers.runs import SMALL, VIT, compose, untimed_rows
from helpers.samples import Numbers
from PIL import Image

from clipx.data.spec import Classes
from clipx.evaluator.base import Embedded
from clipx.evaluator.predictions import Compared, PredictionWriter
from clipx.evaluator.retrieval import RetrievalSpec
from clipx.evaluator.zeroshot import ZeroShotSpec
from clipx.trainer.trainer import Trainer

SMALL_REPORT = (*VIT, "evaluator=[retrieval,zeroshot]", "report=true", "duration=2st", "schedule.warmup=0st")


def written(folder: Path, what: str = "captions") -> Any:
    return json.loads((folder / f"predictions-{what}.json").read_text(encoding="utf-8"))


def compared(images: int, hits: int = 0, **changes: Any) -> Compared:
    """Returns images with two captions each, of which the first so many have the embedding of their first one.

    The others have that of a caption of the next image.
    """
    generator = torch.Generator().manual_seed(0)
    text = F.normalize(torch.randn(2 * images, 16, generator=generator), dim=-1)
    image = text[1::2].roll(-1, 0)
    image[:hits] = text[: 2 * hits : 2]
    texts = [f"text {i}" for i in range(2 * images)]
    captions = [texts[2 * i : 2 * i + 2] for i in range(images)]
    embedded = Embedded(image, captions, [None] * images, range(images))
    values = {"images": embedded, "texts": texts, "text_KD": text, "right": captions, **changes}
    return Compared("captions", Numbers([images]), **values)


@pytest.mark.parametrize(
    ("images", "right", "hits"), [(40, 20, 6), (40, 2, 2), (40, 39, 11), (5, 2, 2), (1, 1, 1), (600, 300, 6)]
)
def test_ranks_match_the_definition_and_half_of_the_images_are_right(
    tmp_path: Path, images: int, right: int, hits: int
) -> None:
    given = compared(images, right)
    PredictionWriter(tmp_path, 3, active=True)(given)
    found = written(tmp_path)
    assert (found["what"], found["texts"], len(found["samples"])) == ("captions", 2 * images, min(images, 12))
    scores = (given.images.image @ given.text_KD.T).tolist()
    for sample in found["samples"]:
        answers = sample["answers"]
        image = next(int(a["text"].split()[1]) // 2 for a in answers if a["right"])
        order = sorted(range(2 * images), key=lambda i: -scores[image][i])
        for answer in answers:
            assert answer["text"] == f"text {order[answer['rank'] - 1]}"
            assert answer["similarity"] == pytest.approx(scores[image][order[answer["rank"] - 1]], abs=1e-4)
            assert answer["right"] == (answer["text"] in given.right[image])
        assert [a["rank"] for a in answers[:3]] == [1, 2, 3][: 2 * images]
    ranks = [next(a["rank"] for a in sample["answers"] if a["right"]) for sample in found["samples"]]
    assert [rank == 1 for rank in ranks] == [True] * hits + [False] * (len(ranks) - hits)


def test_the_choice_is_a_function_of_the_seed(tmp_path: Path) -> None:
    files = []
    for seed in (1, 1, 2):
        PredictionWriter(tmp_path, seed, active=True)(compared(40, 20))
        files.append((tmp_path / "predictions-captions.json").read_bytes())
    assert files[0] == files[1] != files[2]
    assert len(files[0]) < 60_000


def test_pictures_are_of_their_samples_also_behind_bad_ones(tmp_path: Path) -> None:
    colours = [None, "red", "green", None, "blue", "green"]
    labels = [0, 0, 1, 0, 2, 1]
    tool = embedder(max_bad_share=0.5)
    tool.compared = PredictionWriter(tmp_path, 0, active=True)
    data = dataset(colours, labels, Classes(tuple(RGB), ("{}",)))
    RetrievalSpec(kind="retrieval").evaluate(tool, data)
    ZeroShotSpec(kind="zeroshot").evaluate(tool, data)
    for what in ("captions", "classes"):
        samples = written(tmp_path, what)["samples"]
        assert sorted(sample["answers"][0]["text"] for sample in samples) == ["blue", "green", "green", "red"]
        for sample in samples:
            picture = Image.open(io.BytesIO(base64.b64decode(sample["picture"])))
            colour = np.asarray(picture.convert("RGB"), dtype=float).mean((0, 1))
            assert np.abs(colour - RGB[sample["answers"][0]["text"]]).max() < 5
            assert sample["answers"][0]["right"]


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_equal_and_undefined_similarities_are_wrong(tmp_path: Path, value: float) -> None:
    PredictionWriter(tmp_path, 0, active=True)(compared(8, text_KD=torch.full((16, 16), value)))
    for sample in written(tmp_path)["samples"]:
        assert [(a["rank"], a["right"]) for a in sample["answers"]] == [(1, False), (2, False), (3, False), (15, True)]


def test_a_repeated_class_name_is_one_text(tmp_path: Path) -> None:
    given = compared(4, 4, texts=["a", "b", "a", "c", "d", "e", "f", "g"], right=[["a"], ["a"], ["d"], ["f"]])
    given.text_KD[2] = given.text_KD[0]
    PredictionWriter(tmp_path, 0, active=True)(given)
    found = written(tmp_path)
    assert found["texts"] == 7
    assert all(len({a["text"] for a in s["answers"]}) == len(s["answers"]) for s in found["samples"])


def test_long_captions_and_large_images_are_cut(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 255, (400, 800, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(random).save(encoded, "PNG")
    given = compared(12, 12)
    text = [f"{i} {'日' * 5000}" for i in range(24)]
    source = Numbers([12], images=dict.fromkeys(range(12), encoded.getvalue()))
    pairs = [text[2 * i : 2 * i + 2] for i in range(12)]
    PredictionWriter(tmp_path, 0, active=True)(Compared("captions", source, given.images, text, given.text_KD, pairs))
    sample = written(tmp_path)["samples"][0]
    assert Image.open(io.BytesIO(base64.b64decode(sample["picture"]))).size == (96, 48)
    assert {len(answer["text"]) for answer in sample["answers"]} == {201}
    assert (tmp_path / "predictions-captions.json").stat().st_size < 100_000


def test_stored_features_other_ranks_and_further_data_leave_no_file(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros(4, np.float32))
    given = compared(4)
    stored = Numbers([4], images=dict.fromkeys(range(4), array.getvalue()))
    features = Compared("captions", stored, given.images, given.texts, given.text_KD, given.right)
    writer = PredictionWriter(tmp_path, 0, active=True)
    writer(features)
    writer(given)
    PredictionWriter(tmp_path, 0, active=False)(given)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "predictions-captions.json").mkdir()
    with caplog.at_level(logging.WARNING):
        PredictionWriter(tmp_path, 0, active=True)(compared(4))
    assert "sample predictions failed (IsADirectoryError" in caplog.text


@pytest.mark.parametrize("data", slow_except(["shapes", "digits"], "shapes"))
def test_the_report_of_a_run_shows_them_and_its_numbers_do_not_change(tmp_path: Path, data: str) -> None:
    words = [*(w for w in SMALL if data == "shapes" or "samples" not in w), *SMALL_REPORT, f"data={data}", "name=run"]
    for name, report in (("with", "true"), ("without", "false")):
        Trainer(compose(*words, f"report={report}", f"run_dir={tmp_path / name}")).fit()
    assert untimed_rows(tmp_path / "with") == untimed_rows(tmp_path / "without")
    assert not list((tmp_path / "without").glob("predictions*"))
    page = (tmp_path / "with" / "report.html").read_text(encoding="utf-8")
    found = [written(tmp_path / "with", what) for what in ("captions", "classes")]
    assert "Sample predictions" in page
    assert all(sample["picture"] in page for one in found for sample in one["samples"])
    assert [len(one["samples"]) for one in found] == [12, 12]
    assert sum(path.stat().st_size for path in (tmp_path / "with").glob("predictions-*")) < 100_000

    before = found[0]["samples"]
    Trainer(compose(*words, f"run_dir={tmp_path / 'with'}", "resume=auto", "duration=4st")).fit()
    assert written(tmp_path / "with")["samples"] != before


def test_two_ranks_write_them_once(two_ranks: Ranks, tmp_path: Path) -> None:
    """The first rank alone writes, and its numbers are those of a run without a report."""
    for name, report in (("with", "true"), ("without", "false")):
        two_ranks.call(
            _trained, *SMALL, *SMALL_REPORT, f"report={report}", f"run_dir={tmp_path / name}", f"name={name}"
        )
    assert untimed_rows(tmp_path / "with") == untimed_rows(tmp_path / "without")
    assert len(written(tmp_path / "with")["samples"]) == 12
    assert "Sample predictions" in (tmp_path / "with" / "report.html").read_text(encoding="utf-8")


def _trained(*words: str) -> None:
    Trainer(compose(*words)).fit()
