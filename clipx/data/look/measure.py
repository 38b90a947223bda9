"""Measures samples in the processes of the loader: sizes, captions, signatures, and the reasons of unusable ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from clipx.data.loader import TrainBatches
from clipx.data.loader_processes import ProcessLoader
from clipx.data.look.hashing import SIDE, colours, difference_hash, preview
from clipx.data.look.scripts import ALL, main_script
from clipx.data.source import BadRecord, BadSample, Sample, prefetch_samples
from clipx.errors import DataError
from clipx.model.tokenizer import Tokenizer, repaired

FORMATS = ("JPEG", "PNG", "WebP")
MOST_CAPTIONS = 100
"""Number of captions that are counted of each sample: its first ones."""

CHUNK = 32
"""Number of samples of an item of the loader."""

SAMPLE = np.dtype(
    [
        ("index", "i8"),
        ("width", "i8"),
        ("height", "i8"),
        ("bytes", "i8"),
        ("format", "u1"),
        ("captions", "i8"),
        ("digest", "u8", 2),
        ("hash", "u8"),
        ("colours", "u1", (SIDE, SIDE, 3)),
    ]
)
"""A usable sample: index in the source, upright size in pixels, encoded size, number of its format, number of captions,
the first 128 bits of the SHA-256 of the encoded image, signature."""

CAPTION = np.dtype(
    [("index", "i8"), ("number", "i8"), ("characters", "i8"), ("tokens", "i8"), ("script", "u1"), ("digest", "u8")]
)
"""A caption: index of its sample, number among the captions of the sample, lengths, number of its script, the first 64
bits of its SHA-256. `tokens`: without truncation."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Measured samples. `labels`: one for each row of `samples`. `bad`: the unusable samples."""

    samples: NDArray[np.void]
    captions: NDArray[np.void]
    labels: Sequence[int | str | None]
    bad: Sequence[BadRecord]


@dataclass(frozen=True, slots=True)
class _Chunks(Dataset["Chunk | DataError"]):
    """Data set of the measurements of (position, index) pairs of the stream."""

    stream: TrainBatches
    max_pixels: int

    def __getitem__(self, places: Sequence[tuple[int, int]]) -> Chunk | DataError:
        samples, captions = list[tuple[object, ...]](), list[tuple[int, ...]]()
        labels, bad = list[int | str | None](), list[BadRecord]()
        (out,) = self.stream.view.allocate(1)
        try:
            prefetch_samples(self.stream.source, [index for _, index in places])
            for position, index in places:
                try:
                    sample = self.stream.source.read(index)
                    self.stream.view.load(sample.image, self.stream.rng(position), out[0])
                    samples.append(_measured(index, sample, self.max_pixels))
                except BadSample as fault:
                    bad.append(BadRecord(self.stream.source.key(index), str(fault)))
                else:
                    captions += _captions(index, sample.captions, self.stream.tokenizer)
                    labels.append(sample.label)
        except DataError as error:
            return error
        return Chunk(np.array(samples, SAMPLE), np.array(captions, CAPTION), labels, bad)


def measure(stream: TrainBatches, max_pixels: int, places: Sequence[tuple[int, int]], workers: int) -> Iterator[Chunk]:
    """Yields the measurements of (position, index) pairs of a stream, in their order."""
    items = [places[start : start + CHUNK] for start in range(0, len(places), CHUNK)]
    yield from ProcessLoader(_Chunks(stream, max_pixels), items, workers, prefetch=2)


def caption_digest(caption: str) -> int:
    return int.from_bytes(hashlib.sha256(caption.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _measured(index: int, sample: Sample, max_pixels: int) -> tuple[object, ...]:
    """Returns a row of SAMPLE. Raises BadSample."""
    image, (width, height) = preview(sample.image, max_pixels)
    digest = hashlib.sha256(sample.image).digest()
    words = [int.from_bytes(digest[start : start + 8], "big") for start in (0, 8)]
    kind = {b"\xff\xd8": 0, b"\x89P": 1}.get(sample.image[:2], 2)
    size = len(sample.image)
    shown = min(len(sample.captions), MOST_CAPTIONS)
    return index, width, height, size, kind, shown, words, difference_hash(image), colours(image)


def _captions(index: int, captions: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Yields the rows of CAPTION of a sample."""
    for number, caption in enumerate(captions[:MOST_CAPTIONS]):
        tokens = len(tokenizer.encode(caption))
        yield index, number, len(caption), tokens, ALL.index(main_script(repaired(caption))), caption_digest(caption)
