"""Limits that training samples are held to: one below them is a bad sample, replaced and counted with that reason."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from clipx.data.source import BadSample, Sample, WrappedSource


@dataclass(frozen=True, slots=True)
class Filtered(WrappedSource):
    """A source of which samples with an image smaller than `min_side`, or no caption long enough, are bad ones.

    Of several captions those long enough are kept, and a key that is left without one is not drawn.
    """

    # The fingerprint is the source's: the data is the same, and what is kept of it is part of the configuration.

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
            (weight, kept) for weight, held in sample.captions_by_key if (kept := self._long_enough(held))
        ]
        return replace(sample, captions=captions, captions_by_key=captions_by_key)

    def _long_enough(self, captions: Sequence[str]) -> list[str]:
        return [caption for caption in captions if len(caption) >= self.min_caption_chars]


def _size(encoded: bytes) -> tuple[int, int]:
    """Width and height, from the header alone. Where that cannot be read, decoding says what is wrong."""
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP")) as image:
            return image.size
    except Exception:  # decoders keep to no list of what they raise on damaged input
        return sys.maxsize, sys.maxsize
