"""Images of shards: unchanged, or resized to the sizes, crops and borders of img2dataset's Resizer, by Lanczos."""

from __future__ import annotations

import io
import math
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

    from clipx.extra.prepare.command import PrepareSpec

MAX_PIXELS = 89_000_000  # larger images are dropped without decoding: a few bytes can decompress to gigabytes

Size = tuple[int, int]
"""(width, height)"""

# Minimum factor that is left to the LANCZOS filter after libjpeg-turbo has shrunk a JPEG while decoding it. With a
# factor of 2 or more, the result differs invisibly from that of the fully decoded image: 44 to 54 dB on photographs,
# at least 10 dB above the loss of the JPEG encoding at quality 95. With less than 2, it is 32 to 42 dB.
_LEFT_TO_FILTER = 2
_FACTORS = (8, 4, 2)  # factors such as 3/8 have no SIMD code, and shift the centres of pixels


class Resize(StrEnum):
    """Resize mode, with the names and semantics of img2dataset's resize_mode."""

    no = "no"
    """Stores images unchanged, byte for byte."""

    border = "border"
    """Scales the longer side to `size` and pads the image with white to a square."""

    keep_ratio = "keep_ratio"
    """Scales the shorter side to `size`."""

    keep_ratio_largest = "keep_ratio_largest"
    """Scales the longer side to `size`."""

    center_crop = "center_crop"
    """Scales the shorter side to `size` and crops the central square."""


class ShardImage(NamedTuple):
    """An encoded image of a shard, its size, and the size of the source image."""

    encoded: bytes
    size: Size
    original: Size


def shard_image(encoded: bytes, spec: PrepareSpec) -> ShardImage:
    """Returns the image of a sample, resized if `spec` requires it.

    Raises BadSample if the image cannot be decoded, even if it would be stored unchanged.
    """
    from clipx.data.jpeg import plain_jpeg
    from clipx.data.transform import decode

    original = plain_jpeg(encoded, MAX_PIXELS)
    factor = 1 if original is None else _factor(original, spec)
    image = _shrunk(encoded, original, factor) if original and factor > 1 else decode(encoded, MAX_PIXELS)
    original = original or image.size
    resized = resize(image, spec, original, factor)
    if resized is None:
        return ShardImage(encoded, original, original)
    file = io.BytesIO()
    resized.save(file, "JPEG", quality=spec.quality)
    return ShardImage(file.getvalue(), resized.size, original)


def fitted(original: Size, spec: PrepareSpec) -> Size | None:
    """Returns the size that an image is scaled to, before a border or a crop; None if it stays unchanged."""
    longest = spec.resize in (Resize.border, Resize.keep_ratio_largest)
    side = (max if longest else min)(original)
    if spec.resize is Resize.no or (spec.only_shrink and side <= spec.size):
        return None
    scale = spec.size / side  # rounded first, as there: a tie may then fall to the other side
    width, height = (max(1, round(length * scale)) for length in original)
    return width, height


def _factor(original: Size, spec: PrepareSpec) -> int:
    """Returns the factor by which a JPEG can be shrunk while it is decoded; 1 if the full size is needed."""
    if (target := fitted(original, spec)) is None:
        return 1
    room = min(side / (_LEFT_TO_FILTER * new) for side, new in zip(original, target, strict=True))
    return next((factor for factor in _FACTORS if factor <= room), 1)


def _shrunk(encoded: bytes, original: Size, factor: int) -> Image:
    """Decodes a plain JPEG, shrunk by `factor`. Raises BadSample."""
    from PIL import Image as Pillow

    from clipx.data.jpeg import decode_jpeg

    width, height = (math.ceil(side / factor) for side in original)
    return Pillow.fromarray(decode_jpeg(encoded, min_width=width, min_height=height, min_factor=factor))


def resize(image: Image, spec: PrepareSpec, original: Size, factor: int = 1) -> Image | None:
    """Returns the resized image, or None if it stays unchanged.

    Args:
        image: an image of the size `original`, shrunk by `factor`.
    """
    from PIL import Image as Pillow

    if (target := fitted(original, spec)) is None:
        return None
    exact = (0.0, 0.0, original[0] / factor, original[1] / factor)  # the decoder rounds up
    resized = image.resize(target, Pillow.Resampling.LANCZOS, exact)
    if spec.resize in (Resize.keep_ratio, Resize.keep_ratio_largest):
        return resized
    square = Pillow.new("RGB", (spec.size, spec.size), "white")
    left, top = (int((spec.size - length) / 2) for length in target)  # of an odd number, the smaller half is before
    square.paste(resized, (left, top))
    return square
