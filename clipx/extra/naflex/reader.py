"""Images at their own aspect ratio (NaFlex): patches, and the grid of each image.

Shape suffixes: n samples, R rows of an image, X numbers of a patch: see clipx.extra.naflex.patches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from clipx.data.images import Draw, ImageReader, RowType
from clipx.data.inputs import Inputs, mapped
from clipx.data.jpeg import plain_jpeg
from clipx.data.shared_memory import shared_rows
from clipx.data.spec import DataSpec
from clipx.data.transform import PILLOW, Box, box_inside, decode, decode_shrunk, resize
from clipx.extra.naflex.packing import ImagePacker, ImagePacking, PackedImages
from clipx.extra.naflex.patches import grid_bytes, grid_of, patchify, read_grids, write_image
from clipx.model.tower_spec import Interpolation

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


@dataclass(frozen=True, slots=True)
class NativeImages(Inputs):
    """Patches of n images, rows: [n, R, X] uint8, and their order in each micro-batch, which the host packs.

    The grids of the images remain on the host, which reads them without waiting for the device.
    """

    grid_n2: Tensor | None = None
    packer: ImagePacker | None = None  # of the model
    packed: tuple[ImagePacking, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of the images, without the padding to a multiple."""
        return sum(len(packing.tokens.flat_index_T) for packing in self.packed)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        grids = [part.grid_n2 for part in parts if part.grid_n2 is not None]
        rows = torch.cat([part.rows[0] for part in parts])
        return replace(parts[0], rows=(rows,), grid_n2=torch.cat(grids))

    def pack(self, micro_batches: int) -> Self:
        if self.packed:
            return self
        assert self.packer is not None and self.grid_n2 is not None, "the reader was not made for a model"
        rows = self.rows[0].shape[1]
        return replace(self, packed=tuple(self.packer(grids, rows) for grids in self.grid_n2.chunk(micro_batches)))

    def split(self, micro_batches: int, of: int = 0) -> Sequence[Any]:
        images = self.rows[of].chunk(micro_batches)
        return [PackedImages(*each) for each in zip(images, self.packed, strict=True)]

    def with_tensors(self, call: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, rows=mapped(self.rows, Tensor, call), packed=mapped(self.packed, Tensor, call))


@dataclass(frozen=True, slots=True)
class NativeReader(ImageReader):
    """Images of at most `max_tokens` patches of `patch` x `patch` pixels. Training crops have an area share within
    `crop_scale`, and the aspect ratio of their image.

    Rows of a sample are [R, X] uint8.
    """

    patch: int
    max_tokens: int
    crop_scale: Sequence[float]
    max_pixels: int
    interpolation: Interpolation = Interpolation.bicubic
    packer: ImagePacker | None = None  # of the model

    @classmethod
    def build(cls, image: Any, data: DataSpec, size: int | None) -> Self:
        return cls(image.patch, image.max_tokens, data.crop_scale, data.max_pixels, image.interpolation)

    def for_model(self, model: CLIP) -> Self:
        return replace(self, packer=model.image.packer(model.token_multiple))

    def row_types(self) -> Sequence[RowType]:
        return [((1 + self.max_tokens, 3 * self.patch**2), torch.uint8)]

    def blank(self, samples: int, noise: torch.Generator | None = None) -> Tensor:
        """Returns rows of images with all patches."""
        rows_nRX = ImageReader.blank(self, samples, noise)
        rows_nRX[:, 0, :4] = torch.tensor(grid_bytes((1, self.max_tokens)), dtype=torch.uint8)
        return rows_nRX

    def load(self, encoded: bytes, draw: Draw, *rows: Tensor) -> Box:
        (rows_RX,) = rows
        crop, wh = draw.crop, plain_jpeg(encoded, self.max_pixels)
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

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        image = decode(encoded, self.max_pixels)
        grid = grid_of(image.height, image.width, self.patch, self.max_tokens)
        height, width = (self.patch * side for side in grid)
        pixels_HW3 = np.asarray(image.resize((width, height), PILLOW[self.interpolation]), dtype=np.uint8)
        rows_RX = np.empty((1 + self.max_tokens, 3 * self.patch**2), np.uint8)
        write_image(rows_RX, patchify(pixels_HW3, self.patch), grid)
        return torch.from_numpy(rows_RX)

    def inputs(self, rows: Any) -> Inputs:
        (rows_nRX,) = rows
        return NativeImages((shared_rows(rows_nRX),), read_grids(rows_nRX), self.packer)

    def for_data(self, data: DataSpec) -> Self:
        return replace(self, max_pixels=data.max_pixels)


def random_native_box(wh: tuple[int, int], scale: Sequence[float], rng: random.Random) -> Box:
    """Draws a box with an area share within `scale` and, to a pixel, the aspect ratio of the image."""
    share = math.sqrt(rng.uniform(scale[0], scale[1]))
    width, height = (max(1, round(side * share)) for side in wh)
    left, top = rng.randint(0, wh[0] - width), rng.randint(0, wh[1] - height)
    return left, top, left + width, top + height
