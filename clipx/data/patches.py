"""View of images at their own aspect ratio (model.image.native): patches, and the grid of each image.

Shape suffixes: n samples, R rows of an image, X numbers of a patch: see clipx.model.patches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clipx.data.jpeg import plain_jpeg
from clipx.data.shared_memory import empty_rows
from clipx.data.spec import DataSpec
from clipx.data.transform import PILLOW, Box, Crop, box_inside, decode, decode_shrunk, resize
from clipx.model.patches import grid_of, patchify, write_image
from clipx.model.tower_spec import Interpolation


@dataclass(frozen=True, slots=True)
class PatchView:
    """Images of at most `max_tokens` patches of `patch` x `patch` pixels. Training crops have an area share within
    `crop_scale`, and the aspect ratio of their image.

    Rows of a sample are [R, X] uint8.
    """

    patch: int
    max_tokens: int
    crop_scale: Sequence[float]
    max_pixels: int
    interpolation: Interpolation = Interpolation.bicubic
    on_device: ClassVar[bool] = False

    def allocate(self, samples: int, second_size: int | None = None) -> list[Tensor]:
        assert second_size is None, "a teacher model reads square images"
        return [empty_rows((samples, 1 + self.max_tokens, 3 * self.patch**2), torch.uint8)]

    def device_crop(self, encoded: bytes, crop: Crop) -> None:
        return None

    def load(self, encoded: bytes, crop: Crop, *outs: Tensor) -> Box:
        (rows_RX,) = outs
        wh = plain_jpeg(encoded, self.max_pixels)
        image = decode(encoded, self.max_pixels) if wh is None else None
        wh = wh or (image.size if image is not None else (0, 0))
        box = random_native_box(wh, self.crop_scale, crop) if isinstance(crop, random.Random) else box_inside(crop, wh)
        grid = grid_of(box[3] - box[1], box[2] - box[0], self.patch, self.max_tokens)
        height, width = (self.patch * side for side in grid)
        if image is None:
            pixels, scaled = decode_shrunk(encoded, wh, box, (width, height))
        else:
            pixels, scaled = np.array(image), box
        resized_HW3 = torch.empty((height, width, 3), dtype=torch.uint8)
        resize(pixels, scaled, resized_HW3, self.interpolation)
        write_image(rows_RX.numpy(), patchify(resized_HW3.numpy(), self.patch), grid)
        return box

    def augment(self, seed: str, *outs: Tensor, on_device: bool = False) -> None:
        """Has no effect: RunSpec refuses data.augment for these images."""

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        image = decode(encoded, self.max_pixels)
        grid = grid_of(image.height, image.width, self.patch, self.max_tokens)
        height, width = (self.patch * side for side in grid)
        pixels_HW3 = np.asarray(image.resize((width, height), PILLOW[self.interpolation]), dtype=np.uint8)
        rows_RX = np.empty((1 + self.max_tokens, 3 * self.patch**2), np.uint8)
        write_image(rows_RX, patchify(pixels_HW3, self.patch), grid)
        return torch.from_numpy(rows_RX)

    def batch(self, rows: Tensor) -> Tensor:
        return rows

    def for_data(self, data: DataSpec) -> PatchView:
        return replace(self, max_pixels=data.max_pixels)


def random_native_box(wh: tuple[int, int], scale: Sequence[float], rng: random.Random) -> Box:
    """Draws a box with an area share within `scale` and, to a pixel, the aspect ratio of the image."""
    share = math.sqrt(rng.uniform(scale[0], scale[1]))
    width, height = (max(1, round(side * share)) for side in wh)
    left, top = rng.randint(0, wh[0] - width), rng.randint(0, wh[1] - height)
    return left, top, left + width, top + height
