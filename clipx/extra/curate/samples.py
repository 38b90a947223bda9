"""Reads and measures samples in the processes of the loader: what their scores need, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from clipx.data.images import ImageReader
from clipx.data.inputs import Inputs
from clipx.data.source import BadSample, Sample, Source, prefetch_samples
from clipx.extra.curate.entries import Entries
from clipx.extra.curate.score import Score
from clipx.extra.look.duplicates import SIGNATURE_FIELDS, preview, signature
from clipx.extra.look.measure import MOST_CAPTIONS, main_script
from clipx.model.tokenizer import repaired

SIGNATURE = np.dtype([("index", "i8"), *SIGNATURE_FIELDS])
"""Signature of an image, with the number of its sample."""

Row = dict[str, int | float | str | list[int]]
"""Scores of a sample by column; of an unusable one, the column reason alone."""


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Consecutive samples, with a row for each of them. `captions` and `image` have the usable ones alone.

    `image`: the batch of the model, None without a model; `signatures`: empty unless duplicates are searched.
    """

    rows: Sequence[Row]
    captions: Sequence[Sequence[str]]
    image: Inputs | None
    signatures: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class ScoredBatches(Dataset[ScoredBatch]):
    """Data set of the measurements of ranges of the source. `reader`: None if no model reads the images.

    `entries`: None if they are not matched.
    """

    source: Source
    reader: ImageReader | None
    entries: Entries | None
    scores: Sequence[Score]
    max_pixels: int

    def __getitem__(self, indices: range) -> ScoredBatch:
        rows, captions, images = list[Row](), list[Sequence[str]](), list[Tensor]()
        signatures = list[tuple[object, ...]]()
        prefetch_samples(self.source, indices)
        for number in indices:
            try:
                sample = self.source.read(number)
                row, signed = self._measure(number, sample)
                if self.reader is not None:
                    images.append(self.reader.load_for_evaluation(sample.image))
            except BadSample as fault:
                rows.append({"reason": str(fault)})
            else:
                rows.append(row)
                captions.append(sample.captions if Score.similarity in self.scores else ())
                signatures += signed
        image = self.reader.inputs([torch.stack(images)]) if self.reader is not None and images else None
        return ScoredBatch(rows, captions, image, np.array(signatures, SIGNATURE))

    def _measure(self, number: int, sample: Sample) -> tuple[Row, list[tuple[object, ...]]]:
        """Returns the scores that need no model, and the row of SIGNATURE if duplicates are searched."""
        row, found = Row(), list[tuple[object, ...]]()
        if Score.caption in self.scores:
            row |= caption_scores(sample.captions)
        if self.entries is not None:
            row["entries"] = self.entries.match(sample.captions)
        if {Score.image, Score.duplicates} & {*self.scores}:
            shown, (width, height) = preview(sample.image, self.max_pixels)
            if Score.image in self.scores:
                row |= image_scores(shown, width, height)
            if Score.duplicates in self.scores:
                found.append((number, *signature(sample.image, shown)))
        return row, found


def caption_scores(captions: Sequence[str]) -> Row:
    """Returns the number of captions, characters and words of the longest one, and the script of the first 100."""
    longest = max(captions, key=len)
    return {
        "captions": len(captions),
        "characters": len(longest),
        "words": len(longest.split()),
        "script": main_script(repaired("\n".join(captions[:MOST_CAPTIONS]))),
    }


def image_scores(image: Image.Image, width: int, height: int) -> Row:
    """Returns upright size in pixels, shorter side, longer side : shorter side, and entropy in bits.

    The entropy is that of the grey values of `image`, which may be shrunk: 0 for one colour, at most 8.
    """
    return {
        "width": width,
        "height": height,
        "shorter_side": min(width, height),
        "aspect_ratio": max(width, height) / min(width, height),
        "entropy": image.convert("L").entropy(),
    }
