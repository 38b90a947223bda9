"""The reader of images at their own aspect ratio."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from helpers.samples import encode, picture, unpatchify
from PIL import Image
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from clipx.data.images import Draw
from clipx.extra.naflex.patches import read_grids
from clipx.extra.naflex.reader import NativeReader, random_native_box
from clipx.model.tower_spec import Interpolation

SIZES = [(40, 30), (30, 40), (64, 16), (9, 90), (33, 33), (5, 7), (128, 100)]


def test_evaluation_equals_the_processor_of_siglip_2() -> None:
    reader = NativeReader(16, 64, crop_scale=[0.5, 1.0], max_pixels=10**6, interpolation=Interpolation.bilinear)
    for size in SIZES:
        image = picture(*size)
        rows_RX = reader.load_for_evaluation(encode(image, "PNG"))
        theirs = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=64)(images=[image], return_tensors="np")
        grid = read_grids(rows_RX[None])[0].tolist()
        assert grid == theirs["spatial_shapes"][0].tolist(), size
        patches = grid[0] * grid[1]
        found = (rows_RX[1 : 1 + patches].numpy() / 255 - 0.5) / 0.5
        np.testing.assert_allclose(found, theirs["pixel_values"][0][:patches], atol=1e-5, err_msg=str(size))
        assert not rows_RX[1 + patches :].any(), size


def test_a_training_crop_shows_its_box_of_the_image() -> None:
    box, reader = (100, 60, 340, 240), NativeReader(8, 100, [0.5, 1.0], 10**6, interpolation=Interpolation.bicubic)
    for kind in ("JPEG", "PNG"):
        encoded = encode(picture(400, 300), kind)
        rows_RX = reader.allocate(1)[0][0]
        assert reader.load(encoded, Draw(box, ""), rows_RX) == box
        rows, columns = read_grids(rows_RX[None])[0].tolist()
        assert (rows, columns) in ((9, 11), (8, 11)), kind
        found = unpatchify(rows_RX[1 : 1 + rows * columns].numpy(), (rows, columns), 8)
        with Image.open(io.BytesIO(encoded)) as image:
            expected = np.asarray(image.crop(box).resize(found.shape[1::-1], Image.Resampling.BICUBIC))
        assert np.abs(found.astype(float) - expected).mean() < 3, kind


def test_random_boxes_have_the_ratio_of_their_image_and_a_share_of_its_area() -> None:
    shares = []
    for seed in range(500):
        left, top, right, bottom = random_native_box((900, 400), [0.25, 0.81], random.Random(seed))
        assert 0 <= left < right <= 900 and 0 <= top < bottom <= 400
        assert (right - left) / (bottom - top) == pytest.approx(900 / 400, rel=0.01)
        shares.append((right - left) * (bottom - top) / 360_000)
    assert 0.24 < min(shares) < 0.28 and 0.78 < max(shares) < 0.82
    assert random_native_box((1, 3000), [0.01, 0.01], random.Random(0))[2] == 1
