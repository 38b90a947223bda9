"""The image of a shard's sample: as it is, or resized as img2dataset's Resizer does."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.data.prepare.spec import PrepareSpec, Resize

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""(width, height)"""

# libjpeg-turbo halves a JPEG while it decodes it, and LANCZOS does the rest. While that still halves it, the result is
# as near to that of the whole image as no one sees: 44 to 54 dB on photographs, 10 dB or more above what JPEG of
# quality 95 then costs. At less than a half it is 32 to 42 dB.
_LEFT_TO_FILTER = 2
_FACTORS = (8, 4, 2)  # 3/8 and the like have no SIMD, and do not keep the centre of pixels


@dataclass(frozen=True, slots=True)
class ShardImage:
    """`size` is that of `encoded`, `original` that of the image it was made of."""

    encoded: bytes
    size: Size
    original: Size


def shard_image(encoded: bytes, spec: PrepareSpec) -> ShardImage:
    """Raises BadSample for what cannot be decoded, also where it is kept as it is."""
    from clipx.data.transform import decode, plain_jpeg

    original = plain_jpeg(encoded, spec.max_pixels)
    factor = 1 if original is None else _factor(original, spec)
    image = _shrunk(encoded, original, factor) if original and factor > 1 else None
    if original is None or image is None:
        image, factor = decode(encoded, spec.max_pixels), 1
        original = image.size
    resized = resize(image, spec, original, factor)
    if resized is None:
        return ShardImage(encoded, original, original)
    file = io.BytesIO()
    resized.save(file, "JPEG", quality=spec.quality)
    return ShardImage(file.getvalue(), resized.size, original)


def fitted(original: Size, spec: PrepareSpec) -> Size | None:
    """What an image is scaled to, before a border or a crop; None where it stays as it is."""
    longest = spec.resize in (Resize.border, Resize.keep_ratio_largest)
    side = (max if longest else min)(original)
    if spec.resize is Resize.no or (spec.only_shrink and side <= spec.size):
        return None
    width, height = (max(1, round(length * spec.size / side)) for length in original)
    return width, height


def _factor(original: Size, spec: PrepareSpec) -> int:
    """By which a JPEG may be shrunk while it is decoded; 1 where the whole is needed."""
    if (target := fitted(original, spec)) is None:
        return 1
    room = min(side / (_LEFT_TO_FILTER * new) for side, new in zip(original, target, strict=True))
    return next((factor for factor in _FACTORS if factor <= room), 1)


def _shrunk(encoded: bytes, original: Size, factor: int) -> Image | None:
    """None where Pillow has to say whether the damage can be forgiven."""
    import simplejpeg
    from PIL import Image as Pillow

    width, height = (math.ceil(side / factor) for side in original)
    try:
        pixels = simplejpeg.decode_jpeg(encoded, min_width=width, min_height=height, min_factor=factor)
    except ValueError:
        return None
    return Pillow.fromarray(pixels)


def resize(image: Image, spec: PrepareSpec, original: Size, factor: int = 1) -> Image | None:
    """`image` is that of the size `original`, shrunk by `factor`; None where it stays as it is."""
    from PIL import Image as Pillow

    if (target := fitted(original, spec)) is None:
        return None
    exact = (0.0, 0.0, original[0] / factor, original[1] / factor)  # the decoder rounds up
    resized = image.resize(target, Pillow.Resampling.LANCZOS, exact)
    if spec.resize in (Resize.keep_ratio, Resize.keep_ratio_largest):
        return resized
    square = Pillow.new("RGB", (spec.size, spec.size), "white")
    square.paste(resized, ((spec.size - target[0]) // 2, (spec.size - target[1]) // 2))
    return square
