"""Sample predictions of an evaluation: choice, ranks, pictures, and what leaves no file."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.color_model import RGB, dataset, embedder
from helpers.samples import Numbers
from PIL import Image

from clipx.data.spec import Classes
from clipx.evaluator.base import Embedded
from clipx.evaluator.predictions import Compared, PredictionWriter
from clipx.evaluator.retrieval import RetrievalSpec
from clipx.evaluator.zeroshot import ZeroShotSpec


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


@pytest.mark.parametrize(("images", "right", "hits"), [(40, 20, 6), (40, 39, 11), (5, 2, 2)])
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
