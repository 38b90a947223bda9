"""Measures samples in the processes of the loader: sizes, captions, signatures, and the reasons of unusable ones."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from clipx.data.images import Draw
from clipx.data.loader import TrainBatches
from clipx.data.loader_pool import load
from clipx.data.source import BadRecord, BadSample, prefetch_samples
from clipx.extra.look.duplicates import SIGNATURE_FIELDS, preview, signature
from clipx.model.tokenizer import repaired
from clipx.report.console import track

MOST_CAPTIONS = 100
"""Number of captions that are counted of each sample: its first ones."""

_SIZES = [(name, "i8") for name in ("index", "position", "captions", "width", "height", "bytes")]
SAMPLE = np.dtype([*_SIZES, ("format", "S4"), *SIGNATURE_FIELDS])
"""A usable sample: index in the source, position in the stream, number of captions, upright size in pixels, encoded
size, signature."""

_CHUNK = 32  # samples of an item of the loader


class MeasuredCaption(NamedTuple):
    """A caption, with the index of its sample, its number of tokens without truncation and its script."""

    sample: int
    words: str
    tokens: int
    script: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Usable samples, their captions, the number of samples with each label, and the unusable samples."""

    samples: NDArray[np.void]
    captions: Sequence[MeasuredCaption]
    labels: Counter[int | str | None]
    bad: Sequence[BadRecord]


@dataclass(frozen=True, slots=True)
class _Chunks(Dataset[Measured]):
    """Data set of the measurements of (position, index) pairs of the stream."""

    stream: TrainBatches
    max_pixels: int

    def __getitem__(self, places: Sequence[tuple[int, int]]) -> Measured:
        stream, labels, bad = self.stream, Counter[int | str | None](), list[BadRecord]()
        samples, captions = list[tuple[object, ...]](), list[MeasuredCaption]()
        rows = stream.images.allocate(1)
        prefetch_samples(stream.source, [index for _, index in places])
        for position, index in places:
            try:
                sample = stream.source.read(index)
                stream.images.read(sample.image, Draw(random.Random(position), ""), rows, 0)
                image, size = preview(sample.image, self.max_pixels)
            except BadSample as fault:
                bad.append(BadRecord(stream.source.key(index), str(fault)))
                continue
            shown = sample.captions[:MOST_CAPTIONS]
            kind = {b"\xff\xd8": "JPEG", b"\x89P": "PNG"}.get(sample.image[:2], "WebP")
            row = index, position, len(shown), *size, len(sample.image), kind, *signature(sample.image, image)
            samples.append(row)
            for words in shown:
                tokens = len(stream.texts.tokenizer.encode(words))
                captions.append(MeasuredCaption(index, words, tokens, main_script(repaired(words))))
            labels[sample.label] += 1
        return Measured(np.array(samples, SAMPLE), captions, labels, bad)


def measure(stream: TrainBatches, max_pixels: int, positions: range, workers: int) -> Measured:
    """Returns the measurements of the distinct samples at positions of the stream, and shows the progress on stderr."""
    found: dict[int, int] = {}
    for position in positions:
        found.setdefault(stream.order(position), position)
    places = [(position, index) for index, position in found.items()]
    items = [places[start : start + _CHUNK] for start in range(0, len(places), _CHUNK)]
    chunks: Iterable[Measured] = load(None, _Chunks(stream, max_pixels), items, workers=workers, ready=2)
    samples, captions = [np.empty(0, SAMPLE)], list[MeasuredCaption]()
    labels, bad = Counter[int | str | None](), list[BadRecord]()
    for chunk in track(chunks, "reading", len(places), "samples", lambda chunk: len(chunk.samples) + len(chunk.bad)):
        samples.append(chunk.samples)
        captions += chunk.captions
        labels.update(chunk.labels)
        bad += chunk.bad
    return Measured(np.concatenate(samples), captions, labels, bad)


def main_script(text: str) -> str:
    """Returns the script of most letters of a text, by their Unicode names: a hint at its language."""
    if text.isascii():
        return "Latin" if any(map(str.isalpha, text)) else "no letters"
    names = (unicodedata.name(character, "other") for character in text if character.isalpha())
    scripts = Counter(re.split("[ -]", name.removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH "))[0] for name in names)
    most = scripts.most_common(1)[0][0].capitalize() if scripts else "no letters"
    return "Han" if most == "Cjk" else most
