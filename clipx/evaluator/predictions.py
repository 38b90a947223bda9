"""Writes a dozen predictions for held-out images, right and wrong ones, into the run directory: for the report.

Shape suffixes: N images, n candidates among them, K texts, U different texts, D embedding.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipx.data.source import BadSample, Source, prefetch_samples
from clipx.data.spec import MAX_PIXELS
from clipx.data.transform import decode
from clipx.escape import json_text
from clipx.model.transfer import moved
from clipx.report.figure import attempt
from clipx.report.page import picture
from clipx.report.predictions import BEST, Answer, Prediction, Predictions
from clipx.storage.local import write_text

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedded

_CANDIDATES = 512  # images whose similarities are computed: half as many as in a block of the retrieval
_SAMPLES = 12
_SIDE = 96  # pixels
_LONG = 200  # characters


@dataclass(frozen=True, slots=True)
class Compared:
    """Images that an evaluator compares with texts. `what`: the kind of texts in the plural, such as captions.

    `text_KD`: of unit norm. `right`: the correct texts of each image.
    """

    what: str
    source: Source
    images: Embedded
    texts: Sequence[str]
    text_KD: Tensor
    right: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class PredictionWriter:
    """Writes predictions-WHAT.json at an evaluation: of each kind of texts for the first data. Not collective.

    `seed` draws the images: the same ones at each evaluation, but for their choice by right and wrong. `active`: False
    on all ranks but one, and without a report. Stored features show no image, and get no file.
    """

    folder: Path
    seed: int
    active: bool
    _written: set[str] = field(default_factory=set)

    def __call__(self, compared: Compared) -> None:
        if self.active and compared.what not in self._written:
            self._written.add(compared.what)
            attempt("the file of sample predictions", lambda: self._write(compared))

    def _write(self, compared: Compared) -> None:
        images = range(len(compared.images.index))
        candidates = random.Random(self.seed).sample(images, min(len(images), _CANDIDATES))
        if samples := list(_predictions(compared, candidates)):
            found = Predictions(compared.what, len(set(compared.texts)), samples)
            path = self.folder / f"predictions-{found.what}.json"
            write_text(path, json_text(asdict(found)) + "\n")


def _predictions(compared: Compared, candidates: Sequence[int]) -> Iterator[Prediction]:
    """Yields the predictions for a dozen of the candidates: right ones first, half of them if there are as many."""
    first = {text: i for i, text in reversed(list(enumerate(compared.texts)))}  # names of classes may be repeated
    number = {text: i for i, text in enumerate(first)}
    score_nU = (compared.images.image[candidates] @ compared.text_KD[list(first.values())].T).float().nan_to_num_(-1)
    right = [{number[text] for text in compared.right[image]} for image in candidates]
    pairs_P2 = torch.tensor([(n, text) for n, texts in enumerate(right) for text in texts])
    at = tuple(moved(pairs_P2, score_nU.device).T)
    # Of equal scores the wrong text is first, as in the metrics.
    score_nU[at] = torch.nextafter(score_nU[at], score_nU.new_tensor(-torch.inf))
    top_n = score_nU.argmax(1).tolist()
    hits, misses = ([n for n, top in enumerate(top_n) if (top in right[n]) is hit] for hit in (True, False))
    hits = hits[: max(_SAMPLES // 2, _SAMPLES - len(misses))]
    index = {n: compared.images.index[candidates[n]] for n in [*hits, *misses[: _SAMPLES - len(hits)]]}
    prefetch_samples(compared.source, list(index.values()))
    for n in index:
        with contextlib.suppress(BadSample):  # stored features, or an image that can be read no more
            image = decode(compared.source.read(index[n]).image, MAX_PIXELS)
            small = picture(image, _SIDE, quality=75, optimize=True)
            yield Prediction(small, _answers(score_nU[n], list(first), right[n]))


def _answers(score_U: Tensor, texts: Sequence[str], right: Collection[int]) -> list[Answer]:
    """Returns the best answers, and the best right one if it is not among them."""
    order = score_U.argsort(descending=True).tolist()
    best_right = next(rank for rank, text in enumerate(order) if text in right)
    found = [(1 + rank, order[rank]) for rank in dict.fromkeys([*range(min(BEST, len(order))), best_right])]
    return [
        Answer(texts[i][:_LONG] + "…" * (len(texts[i]) > _LONG), rank, round(float(score_U[i]), 4), i in right)
        for rank, i in found
    ]
