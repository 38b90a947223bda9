"""Encoded image -> square uint8 RGB. Normalisation happens on the device, in the model."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from clipx.data.source import BadSample

Pixels = NDArray[np.uint8]
"""[size, size, 3]"""

_RATIO = (3 / 4, 4 / 3)
_UPRIGHT = {  # what undoes each orientation that a camera notes
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(encoded: bytes, max_pixels: int) -> Image.Image:
    """JPEG, PNG or WebP to RGB, upright: the first frame, 16 bits as their upper 8, what is transparent on white.

    Raises BadSample with the reason. The size is checked before anything is unpacked.
    """
    if not encoded:
        raise BadSample("image is empty")
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.width * image.height > max_pixels:
                raise BadSample(
                    f"image has {image.width}x{image.height} pixels, more than data.max_pixels={max_pixels}"
                )
            rgb = _rgb(image)
            turn = _UPRIGHT.get(_orientation(image))
            return rgb if turn is None else rgb.transpose(turn)
    except BadSample:
        raise
    except UnidentifiedImageError:
        raise BadSample("image is not JPEG, PNG or WebP, or its header is damaged") from None
    except Exception as error:  # decoders keep to no list of what they raise on damaged input
        raise BadSample(f"image cannot be decoded: {' '.join(str(error).split())[:120]}") from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """EXIF's, 1 being upright. After decoding: PNG may carry it behind the pixels."""
    orientation = 1
    with suppress(Exception):  # a damaged tag is no reason to lose the image
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return orientation


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
    image = _shortened(image)
    width, height = image.size
    short = min(width, height)
    w, h = size * width // short, size * height // short
    if (w, h) != image.size:
        image = image.resize((w, h), Image.Resampling.BICUBIC)
    left, top = round((w - size) / 2), round((h - size) / 2)
    return _pixels(image.crop((left, top, left + size, top + size)))


def _shortened(image: Image.Image) -> Image.Image:
    """The middle of an image longer than 8:1: all of 1 x 65,535 pixels, resized to a width of 224, would take 10 GB."""
    width, height = image.size
    most = 8 * min(width, height)
    w, h = (side if side <= most else most + (side - most) % 2 for side in image.size)  # even rests: the same middle
    left, top = (width - w) // 2, (height - h) // 2
    return image if (w, h) == image.size else image.crop((left, top, left + w, top + h))


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image, dtype=np.uint8)
