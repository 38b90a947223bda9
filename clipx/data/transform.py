"""Encoded image -> square uint8 RGB. Normalisation happens on the device, in the model."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipx.data.source import BadSample

Pixels = NDArray[np.uint8]
"""[size, size, 3]"""

_RATIO = (3 / 4, 4 / 3)


def decode(encoded: bytes, max_pixels: int) -> Image.Image:
    """JPEG, PNG or WebP to RGB. Raises BadSample with the reason; checks the size before it unpacks anything."""
    if not encoded:
        raise BadSample("image is empty")
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.width * image.height > max_pixels:
                raise BadSample(
                    f"image has {image.width}x{image.height} pixels, more than data.max_pixels={max_pixels}"
                )
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadSample(f"image cannot be decoded: {' '.join(str(error).split())[:120]}") from None


def train_transform(image: Image.Image, size: int, scale: Sequence[float], rng: random.Random) -> Pixels:
    """A random crop of the given share of the area, aspect ratio 3/4 to 4/3, resized to `size` (arXiv:1409.4842)."""
    return _pixels(image.resize((size, size), Image.Resampling.BICUBIC, box=_random_box(image.size, scale, rng)))


def _random_box(wh: tuple[int, int], scale: Sequence[float], rng: random.Random) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) in whole pixels; the distribution of torchvision's RandomResizedCrop."""
    width, height = wh
    for _ in range(10):
        area = width * height * rng.uniform(scale[0], scale[1])
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # the image is too long or too tall: the largest centred box of an allowed ratio
        ratio = min(max(width / height, _RATIO[0]), _RATIO[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h
    left, top = rng.randint(0, width - w), rng.randint(0, height - h)
    return left, top, left + w, top + h


def eval_transform(image: Image.Image, size: int) -> Pixels:
    """The shorter side resized to `size`, bicubic, and the centre cut out."""
    width, height = image.size
    short = min(width, height)
    w, h = max(size, int(size * width / short)), max(size, int(size * height / short))
    if (w, h) != image.size:
        image = image.resize((w, h), Image.Resampling.BICUBIC)
    left, top = round((w - size) / 2), round((h - size) / 2)
    return _pixels(image.crop((left, top, left + size, top + size)))


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image, dtype=np.uint8)
