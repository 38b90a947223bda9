"""Sample predictions of an evaluation: choice, ranks, pictures, and what leaves no file."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from helpers.color_model import RGB, dataset, embedder
from PIL import Image

from clipx.data.spec import Classes
from clipx.evaluator.predictions import PredictionWriter
from clipx.evaluator.retrieval import RetrievalSpec
from clipx.evaluator.zeroshot import ZeroShotSpec


def written(folder: Path, what: str = "captions") -> Any:
    return json.loads((folder / f"predictions-{what}.json").read_text(encoding="utf-8"))


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
