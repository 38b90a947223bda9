"""Writes a dozen predictions for held-out images, right and wrong ones, into the run directory: for the report.

Shape suffixes: N images, n candidates among them, K texts, U different texts, D embedding.
"""

from __future__ import annotations

import base64
import contextlib
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipx.data.source import BadSample, Source, prefetch_samples
from clipx.data.spec import MAX_PIXELS
from clipx.data.transform import decode
from clipx.report.attempt import attempt
from clipx.report.predictions import BEST, Answer, Prediction, Predictions

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedded

_CANDIDATES = 1024  # images whose similarities are computed, with the memory of a block of the retrieval
_SAMPLES = 12
_SIDE = 96  # pixels
_QUALITY = 80
_MOST_TEXT = 200  # characters


@dataclass(frozen=True, slots=True)
class Compared:
    """Images that an evaluator compares with texts."""

    what: str
    """What the texts are, in the plural: captions, classes. A part of the name of the file."""

    source: Source
    images: Embedded
    texts: Sequence[str]
    text_KD: Tensor
    """[K, D], unit norm."""

    right: Sequence[Sequence[str]]
    """Correct texts of each image."""


@dataclass(frozen=True, slots=True)
class PredictionWriter:
    """Writes the predictions of one evaluation: of each kind of texts those for the first data.

    The images are drawn by `seed`: the same ones each time but for their choice by right and wrong.
    """

    folder: Path
    seed: int
    active: bool
    """False on all ranks but one, and without a report."""

    _written: set[str] = field(default_factory=set)

    def __call__(self, compared: Compared) -> None:
        """Writes predictions-WHAT.json. Writes nothing for stored features, which show no image. Not collective."""
        if self.active and compared.what not in self._written:
            self._written.add(compared.what)
            attempt("the file of sample predictions", lambda: self._write(compared))

    def _write(self, compared: Compared) -> None:
        count = len(compared.images.index)
        candidates = random.Random(self.seed).sample(range(count), min(count, _CANDIDATES))
        found = list(_predictions(compared, candidates))
        if found:
            Predictions(compared.what, len(set(compared.texts)), found).write(self.folder)


def _predictions(compared: Compared, candidates: Sequence[int]) -> Iterator[Prediction]:
    """Yields the predictions for a dozen of the candidates: right ones first, half of them if there are as many."""
    place = {text: i for i, text in reversed(list(enumerate(compared.texts)))}  # the first of repeated class names
    texts = list(place)
    number = {text: i for i, text in enumerate(texts)}
    score_nU = (compared.images.image[candidates] @ compared.text_KD[list(place.values())].T).float().nan_to_num(-1)
    pairs = [(row, number[text]) for row, image in enumerate(candidates) for text in compared.right[image]]
    right_nU = torch.zeros_like(score_nU, dtype=torch.bool)
    right_nU[tuple(torch.tensor(pairs, device=score_nU.device).T)] = True
    # Of equal scores the wrong text is first, as in the metrics.
    score_nU = torch.where(right_nU, torch.nextafter(score_nU, score_nU.new_tensor(-torch.inf)), score_nU)
    hit_n = right_nU.gather(1, score_nU.argmax(1, keepdim=True))[:, 0].tolist()
    hits, misses = ([row for row, hit in enumerate(hit_n) if hit is wanted] for wanted in (True, False))
    hits = hits[: max(_SAMPLES // 2, _SAMPLES - len(misses))]
    rows = {row: compared.images.index[candidates[row]] for row in [*hits, *misses[: _SAMPLES - len(hits)]]}
    prefetch_samples(compared.source, list(rows.values()))
    for row, index in rows.items():
        with contextlib.suppress(BadSample):  # stored features, or an image that can be read no more
            picture = _picture(compared.source.read(index).image)
            order_U = score_nU[row].argsort(descending=True)
            ranks = dict.fromkeys([*range(min(BEST, len(texts))), int(right_nU[row, order_U].int().argmax())])
            yield Prediction(
                picture, [_answer(rank, order_U[rank], score_nU[row], right_nU[row], texts) for rank in ranks]
            )


def _answer(rank: int, at: Tensor, score_U: Tensor, right_U: Tensor, texts: Sequence[str]) -> Answer:
    text = texts[int(at)]
    short = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"
    return Answer(short, 1 + rank, round(float(score_U[at]), 4), bool(right_U[at]))


def _picture(encoded: bytes) -> str:
    """Returns the whole image in small as JPEG in base64. Raises BadSample."""
    image = decode(encoded, MAX_PIXELS)
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY, optimize=True)
    return base64.b64encode(file.getvalue()).decode()
