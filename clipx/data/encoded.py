"""Encoded images of a batch, with data.decode=gpu: a loader process checks them and draws their crops only.

Shape suffixes: m encoded images of a part of a batch, N bytes of their files together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clipx.data.jpeg import is_baseline, is_flawless, plain_jpeg
from clipx.data.transform import RATIO, Box, Crop, box_of

LARGEST = 2**24
"""Pixels of the largest image that the device decodes: 50 MB. libjpeg-turbo shrinks a larger one while decoding."""

_TAIL = 1024  # bytes at the end of a file that are searched for its end marker


class DeviceCrop(NamedTuple):
    """Crop of an encoded image that the device decodes."""

    file: bytes
    wh: tuple[int, int]
    box: Box


Place = tuple[int, int, int]
"""Row of a sample in its batch, its position in the stream, and the number of its stored crop."""


class EncodedImage(NamedTuple):
    """Row of EncodedImages.table_m11: place of the sample, bytes of the file, size and crop of the image."""

    row: int
    position: int
    number: int
    stop: int  # end of the file in the data
    width: int
    height: int
    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """JPEG files of a part of a batch that the device decodes, one after the other in `data_N`, uint8."""

    data_N: Tensor
    table_m11: Tensor  # int64

    @classmethod
    def of(cls, crops: Sequence[tuple[Place, DeviceCrop]], shared: Callable[[Tensor], Tensor]) -> EncodedImages:
        """Returns the images at these places, their files in memory of `shared`."""
        stops = itertools.accumulate(len(crop.file) for _, crop in crops)
        table = [(*place, stop, *crop.wh, *crop.box) for (place, crop), stop in zip(crops, stops, strict=True)]
        data = np.concatenate([np.empty(0, np.uint8), *(np.frombuffer(crop.file, np.uint8) for _, crop in crops)])
        return cls(
            shared(torch.from_numpy(data)),
            torch.tensor(table, dtype=torch.int64).reshape(-1, len(EncodedImage._fields)),
        )

    def __iter__(self) -> Iterator[tuple[EncodedImage, Tensor]]:
        """Yields each image with its file."""
        start = 0
        for values in self.table_m11.tolist():
            image = EncodedImage(*values)
            yield image, self.data_N[start : image.stop]
            start = image.stop

    def moved(self, first: int) -> EncodedImages:
        """Returns a copy in new memory for a part of a batch that begins at row `first`."""
        table = self.table_m11.clone()
        table[:, 0] += first
        return replace(self, data_N=self.data_N.clone(), table_m11=table)


def device_crop(
    encoded: bytes, scale: Sequence[float], max_pixels: int, crop: Crop, ratio: Sequence[float] = RATIO
) -> DeviceCrop | None:
    """Returns the crop of an image that the device decodes: a plain, flawless baseline JPEG of at most LARGEST pixels.

    Returns None for any other image, without a draw: nvJPEG does not tell a half-grey one from a whole one. The draws
    are those of `train_transform`. Raises BadSample for a box that is not inside of the image.
    """
    wh = plain_jpeg(encoded, min(max_pixels, LARGEST))
    if wh is None or not is_baseline(encoded) or encoded.find(b"\xff\xd9", -_TAIL) < 0 or not is_flawless(encoded):
        return None
    return DeviceCrop(encoded, wh, box_of(crop, wh, scale, ratio))
