"""Filters of training samples. A sample below a limit is a bad sample: it is replaced, and counted with the reason."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from clipx.data import transform  # noqa: F401  # lifts Pillow's limit of pixels
from clipx.data.source import BadSample, Sample, WrappedSource


@dataclass(frozen=True, slots=True)
class Filtered(WrappedSource):
    """Source in which samples with an image side below `min_side`, or without a caption long enough, are bad samples.

    Shorter captions of a sample are dropped, and a key without remaining captions is not drawn.
    """

    # The fingerprint is that of the source: the data is the same, and the limits are part of the configuration.

    min_caption_chars: int
    min_side: int

    def read(self, index: int) -> Sample:
        sample = self.source.read(index)
        captions = self._long_enough(sample.captions)
        if not captions:
            longest = max(map(len, sample.captions))
            raise BadSample(
                f"caption has {longest} characters, fewer than data.min_caption_chars={self.min_caption_chars}"
            )
        if self.min_side:
            width, height = _size(sample.image)
            if min(width, height) < self.min_side:
                raise BadSample(f"image has {width}x{height} pixels, a side below data.min_side={self.min_side}")
        captions_by_key = [
            (weight, long) for weight, captions in sample.captions_by_key if (long := self._long_enough(captions))
        ]
        return replace(sample, captions=captions, captions_by_key=captions_by_key)

    def _long_enough(self, captions: Sequence[str]) -> list[str]:
        return [caption for caption in captions if len(caption) >= self.min_caption_chars]


def _size(encoded: bytes) -> tuple[int, int]:
    """Returns (width, height) from the header alone; maximal values if it is unreadable: decoding reports the fault."""
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP")) as image:
            return image.size
    except Exception:  # decoders raise undocumented exceptions on damaged input
        return sys.maxsize, sys.maxsize
