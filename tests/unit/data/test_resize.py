"""Resizing as in img2dataset, and the error of reduced-size JPEG decoding."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from helpers.samples import encode, picture
from PIL import Image
from sklearn.datasets import load_sample_image

from clipx.data.prepare.resize import _factor, resize, shard_image
from clipx.data.prepare.spec import PrepareSpec, Resize
from clipx.data.transform import decode

SCALED = [Resize.border, Resize.keep_ratio, Resize.keep_ratio_largest, Resize.center_crop]


def spec(mode: Resize = Resize.keep_ratio, **options: Any) -> PrepareSpec:
    return PrepareSpec(source="a", out="b", resize=mode, **options)


def resized_from_full_size(encoded: bytes, how: PrepareSpec) -> Image.Image:
    """Reference: decodes the full size, then resizes."""
    image = decode(encoded, how.max_pixels)
    resized = resize(image, how, image.size)
    assert resized is not None
    return resized


def open_rgb(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def decibel(one: Image.Image, other: Image.Image) -> float:
    error = np.square(np.asarray(one, float) - np.asarray(other, float)).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / float(error))


def test_resized_sizes_follow_img2dataset() -> None:
    def size(mode: Resize, width: int, height: int, only_shrink: bool) -> Any:
        how = {} if mode is Resize.no else {"size": 100, "only_shrink": only_shrink}
        found = resize(picture(width, height), spec(mode, **how), (width, height))
        return None if found is None else found.size

    for mode, expected in {
        Resize.no: None,
        Resize.border: (100, 100),
        Resize.keep_ratio: (200, 100),
        Resize.keep_ratio_largest: (100, 50),
        Resize.center_crop: (100, 100),
    }.items():
        assert size(mode, 400, 200, True) == size(mode, 400, 200, False) == size(mode, 40, 20, False) == expected, mode
        assert size(mode, 40, 20, True) is None, mode


# ------------------------------------------------------------------------------------------ reduced-size decoding


@pytest.mark.parametrize("mode", SCALED)
@pytest.mark.parametrize(("subsampling", "size"), [(0, 100), (2, 26)])
def test_reduced_decoding_adds_less_error_than_the_output_jpeg(mode: Resize, subsampling: int, size: int) -> None:
    for name in ("china.jpg", "flower.jpg"):
        photograph = Image.fromarray(load_sample_image(name)[:425, :631])  # no side is a multiple of 2
        encoded = encode(photograph, "JPEG", quality=92, subsampling=subsampling)
        how = spec(mode, size=size, quality=95)
        assert _factor(photograph.size, how) > 1, name
        straight = resized_from_full_size(encoded, how)
        small = shard_image(encoded, how)
        assert (small.size, small.original) == (straight.size, photograph.size), name
        written = open_rgb(encode(straight, "JPEG", quality=95))
        lossless = _before_writing(encoded, how)
        assert decibel(lossless, straight) > max(43, decibel(written, straight) + 6), name
        assert decibel(open_rgb(small.encoded), straight) > decibel(written, straight) - 1.5, name


def _before_writing(encoded: bytes, how: PrepareSpec) -> Image.Image:
    """Returns the image that `shard_image` passes to the encoder."""
    saved: list[Image.Image] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda self, *_, **__: saved.append(self))
        shard_image(encoded, how)
    return saved[0]
