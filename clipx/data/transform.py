"""Image transforms: encoded image to square uint8 RGB. The model normalises on the device.

Training takes the fastest path to the same picture: libjpeg-turbo, which shrinks a JPEG while decoding it, and torch's
filters, which are Pillow's in SIMD. Evaluation decodes whole images. All paths have the same bad samples.
"""

from __future__ import annotations

import io
import math
import random
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from clipx.compat import resize_bicubic, resize_bilinear
from clipx.data.jpeg import Pixels, decode_jpeg, plain_jpeg, readable_jpeg
from clipx.data.source import BadSample
from clipx.model.tower_spec import Interpolation

Image.MAX_IMAGE_PIXELS = None  # max_pixels is the limit: Pillow's warns from 89 million pixels on, and then refuses

Box = tuple[int, int, int, int]  # (left, top, right, bottom) in whole pixels

Crop = random.Random | Box  # a box of the upright image, or the generator from which one is drawn

RATIO = (3 / 4, 4 / 3)  # default range of the aspect ratio of random crops (arXiv:1409.4842)

_JPEGS = ("JPEG", "MPO")  # MPO: several, of which the first is read
_UPRIGHT = {  # EXIF orientation -> transposition to upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(encoded: bytes, max_pixels: int) -> Image.Image:
    """Decodes JPEG, PNG or WebP to upright RGB: the first frame, the upper 8 of 16 bits, transparency on white. Raises
    BadSample with the reason."""
    if plain_jpeg(encoded, max_pixels) is not None:
        return Image.fromarray(decode_jpeg(encoded))
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.width * image.height > max_pixels:
                raise BadSample(
                    f"image has {image.width}x{image.height} pixels, more than data.max_pixels={max_pixels}"
                )
            rgb = _rgb_of_jpeg(image, encoded) if image.format in _JPEGS else _rgb(image)
            turn = _UPRIGHT.get(_orientation(image))
            return rgb if turn is None else rgb.transpose(turn)
    except BadSample:
        raise
    except UnidentifiedImageError:
        from clipx.data.image_files import reason_unread

        raise BadSample(reason_unread(encoded)) from None
    except Exception as error:  # decoders raise undocumented exceptions on damaged input
        raise BadSample(f"image cannot be decoded: {' '.join(str(error).split())[:120]}") from None


def _rgb_of_jpeg(image: Image.Image, encoded: bytes) -> Image.Image:
    readable = readable_jpeg(encoded, image.size)
    if readable is None:
        return _rgb(image)
    if image.mode == "CMYK":  # stored inverted, as by Adobe's programs and in Pillow
        return Image.fromarray(255 - decode_jpeg(readable, "CMYK"), "CMYK").convert("RGB")
    return Image.fromarray(decode_jpeg(readable))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow clips at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, 1 for upright. Call it after decoding: PNG may store it behind the pixels."""
    orientation = 1
    with suppress(Exception):  # an image with a damaged tag is still usable
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return orientation


class _Scratch(threading.local):
    """Buffer of a thread for decoded JPEGs: allocating memory for each image takes 5 % of the time."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def of(self, size: int) -> NDArray[np.uint8]:
        """Returns at least `size` bytes. Only pages that have been written to occupy memory."""
        if self.memory.size < size:
            self.memory = np.empty(size, np.uint8)
        return self.memory


_scratch = _Scratch()


def train_transform(
    encoded: bytes,
    scale: Sequence[float],
    max_pixels: int,
    crop: Crop,
    *outs_SS3: torch.Tensor,
    interpolation: Interpolation = Interpolation.bicubic,
    ratio: Sequence[float] = RATIO,
) -> Box:
    """Resizes a crop into `outs_SS3` and returns its box. A random one has area share `scale` and aspect ratio `ratio`.
    Raises BadSample as `decode` does, and for a box that is not inside of the image."""
    wh = plain_jpeg(encoded, max_pixels)
    if wh is None:
        image = decode(encoded, max_pixels)
        pixels, box = np.array(image), box_of(crop, image.size, scale, ratio)
        scaled = box
    else:
        box = box_of(crop, wh, scale, ratio)
        size = max(map(len, outs_SS3))
        pixels, scaled = decode_shrunk(encoded, wh, box, (size, size))
    for out_SS3 in outs_SS3:
        resize(pixels, scaled, out_SS3, interpolation)
    return box


def box_of(crop: Crop, wh: tuple[int, int], scale: Sequence[float], ratio: Sequence[float] = RATIO) -> Box:
    """Returns the box of a crop of an image, drawn if it is not given. Raises BadSample if it is not inside."""
    return random_box(wh, scale, crop, ratio) if isinstance(crop, random.Random) else box_inside(crop, wh)


def box_inside(crop: Box, wh: tuple[int, int]) -> Box:
    """Returns a stored box of an image. Raises BadSample if it is not inside."""
    left, top, right, bottom = crop
    if not (0 <= left < right <= wh[0] and 0 <= top < bottom <= wh[1]):
        raise BadSample(f"image has {wh[0]}x{wh[1]} pixels, its stored crop is {left},{top} to {right},{bottom}")
    return crop


def decode_shrunk(encoded: bytes, wh: tuple[int, int], box: Box, to: tuple[int, int]) -> tuple[Pixels, Box]:
    """Decodes a JPEG of wh pixels, shrunk while the box stays at least `to`, and returns it with the scaled box. `to`:
    width and height to which the box is resized."""
    left, top, right, bottom = box
    # The smallest image size at which the box has at least `to` pixels; simplejpeg selects the DCT scale for it. Only
    # scales of 1/2 and less: libjpeg-turbo has no SIMD for 5/8 and the like, which take as long as the full size.
    sides = (right - left, bottom - top)
    least = (math.ceil(w * size / side) for w, size, side in zip(wh, to, sides, strict=True))
    width, height = least
    memory = _scratch.of(wh[0] * wh[1] * 3)
    pixels = decode_jpeg(encoded, min_width=width, min_height=height, min_factor=2, buffer=memory)
    fx, fy = pixels.shape[1] / wh[0], pixels.shape[0] / wh[1]
    return pixels, (round(left * fx), round(top * fy), round(right * fx), round(bottom * fy))


def resize(
    pixels: Pixels, box: Box, out_SS3: torch.Tensor, interpolation: Interpolation = Interpolation.bicubic
) -> None:
    """Resizes the box of an image into `out_SS3`, of any two sides, with antialiasing, in integers, as in Pillow."""
    left, top, right, bottom = box
    cut_1hw3 = torch.from_numpy(pixels)[None, top:bottom, left:right]  # the filter sees channels-last strides
    _RESIZE[interpolation](
        cut_1hw3.permute(0, 3, 1, 2), out_SS3.shape[:2], False, out=out_SS3[None].permute(0, 3, 1, 2)
    )


_RESIZE = {
    Interpolation.bicubic: resize_bicubic.out,
    Interpolation.bilinear: resize_bilinear.out,
}


def random_box(wh: tuple[int, int], scale: Sequence[float], rng: random.Random, ratios: Sequence[float] = RATIO) -> Box:
    """Draws a box with the distribution of torchvision's RandomResizedCrop."""
    width, height = wh
    for _ in range(10):
        area = width * height * rng.uniform(scale[0], scale[1])
        ratio = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    else:  # the image is too long or too tall: the largest centred box of an allowed ratio
        ratio = min(max(width / height, ratios[0]), ratios[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h
    left, top = rng.randint(0, width - w), rng.randint(0, height - h)
    return left, top, left + w, top + h


def eval_transform(
    image: Image.Image, size: int, stretch: bool = False, interpolation: Interpolation = Interpolation.bicubic
) -> Pixels:
    """Resizes the shorter side to `size` and crops the centre. `stretch`: resizes both sides, no crop."""
    method = PILLOW[interpolation]
    if stretch:
        return _pixels(image.resize((size, size), method))
    image = _shortened(image)
    width, height = image.size
    short = min(width, height)
    w, h = size * width // short, size * height // short
    if (w, h) != image.size:
        image = image.resize((w, h), method)
    left, top = round((w - size) / 2), round((h - size) / 2)
    return _pixels(image.crop((left, top, left + size, top + size)))


PILLOW = {
    Interpolation.bicubic: Image.Resampling.BICUBIC,
    Interpolation.bilinear: Image.Resampling.BILINEAR,
}


def _shortened(image: Image.Image) -> Image.Image:
    """Crops an image longer than 8:1 to its middle: 1 x 65,535 pixels resized to a width of 224 would take 10 GB."""
    width, height = image.size
    most = 8 * min(width, height)
    # An even number of pixels is cut off, so the centre stays the same.
    w, h = (side if side <= most else most + (side - most) % 2 for side in image.size)
    left, top = (width - w) // 2, (height - h) // 2
    return image if (w, h) == image.size else image.crop((left, top, left + w, top + h))


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image, dtype=np.uint8)
