"""Encoded images of a batch (data.decode=gpu): a loader process checks them and draws their crops only.

Shape suffixes: n samples, m images that the device decodes, N bytes of their files together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from clipx.data.images import Draw, PixelReader
from clipx.data.inputs import Inputs
from clipx.data.jpeg import ADOBE, SCAN, fault_of, plain_jpeg, segments
from clipx.data.shared_memory import shared_rows
from clipx.data.transform import RATIO, Box, Crop, box_of

LARGEST = 2**24
"""Pixels of the largest image that the device decodes: 50 MB. libjpeg-turbo shrinks a larger one while decoding."""

_BASELINE = 0xC0  # kind of a segment
_TAIL = 1024  # bytes at the end of a file that are searched for its end marker


class EncodedImage(NamedTuple):
    """Image that the device decodes: its row in the batch, its size and crop, and the seed of its augmentation."""

    row: int
    width: int
    height: int
    box: Box
    seed: str
    stop: int = 0  # end of its file in the data


@dataclass(frozen=True, slots=True)
class EncodedImages(Inputs):
    """Images of n samples. `data_N`, uint8, has the files of those that the device decodes, one after the other. rows:
    pixels of the other images, in the order of the samples."""

    reader: PixelReader
    images: Sequence[EncodedImage]
    data_N: Tensor

    def __len__(self) -> int:
        return len(self.rows[0]) + len(self.images)

    def __iter__(self) -> Iterator[tuple[EncodedImage, Tensor]]:
        """Yields each image with its file."""
        start = 0
        for image in self.images:
            yield image, self.data_N[start : image.stop]
            start = image.stop

    @property
    def remark(self) -> str:
        count, total = len(self.images), len(self)
        if 2 * count >= total:
            return ""
        return (
            f"data.decode=gpu: the device decodes {count} of the {total} images of a batch; loader processes decode "
            f"the others, which are no upright baseline JPEGs of at most {LARGEST} pixels"
        )

    def to(self, device: torch.device) -> Inputs:
        """Returns the pixels of all images on the device. Raises DataError."""
        from clipx.extra.gpu_decode.decoder import decode_images

        return decode_images(self, device)


@dataclass(slots=True)
class _EncodedRows:
    """Rows of the images that the CPU decodes, each at its place, and the images by place that it does not decode."""

    pixels: list[Tensor]
    images: dict[int, tuple[EncodedImage, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedReader(PixelReader):
    """Reader of training images that leaves plain JPEGs to the device, and decodes all others."""

    @classmethod
    def like(cls, reader: PixelReader) -> Self:
        """Returns a reader of the same crops."""
        return cls(**{f.name: getattr(reader, f.name) for f in fields(reader)})

    def check_device(self, device: torch.device) -> None:
        from clipx.extra.gpu_decode.decoder import check_device_decoding

        check_device_decoding(device)

    def sample_bytes(self) -> int:
        return 0  # the size of the file is not known

    def allocate(self, samples: int) -> Any:
        return _EncodedRows(PixelReader.allocate(self, samples))

    def read(self, encoded: bytes, draw: Draw, rows: Any, place: int) -> Box | None:
        rows.images.pop(place, None)
        found = device_crop(encoded, self.crop_scale, self.max_pixels, draw.crop, self.crop_ratio)
        if found is None:
            return self.load(encoded, draw, *(some[place] for some in rows.pixels))
        rows.images[place] = EncodedImage(place, *found, draw.seed), encoded
        return found[2]

    def inputs(self, rows: Any) -> Inputs:
        if not isinstance(rows, _EncodedRows):
            return PixelReader.inputs(self, rows)
        left = [place for place in range(len(rows.pixels[0])) if place not in rows.images]
        pixels = PixelReader.inputs(self, [some[left] for some in rows.pixels])
        chosen = [rows.images[place] for place in sorted(rows.images)]
        stops = itertools.accumulate(len(encoded) for _, encoded in chosen)
        images = [image._replace(stop=stop) for (image, _), stop in zip(chosen, stops, strict=True)]
        data = np.concatenate([np.empty(0, np.uint8), *(np.frombuffer(encoded, np.uint8) for _, encoded in chosen)])
        return EncodedImages(pixels.rows, self, images, shared_rows(torch.from_numpy(data)))


def device_crop(
    encoded: bytes, scale: Sequence[float], max_pixels: int, crop: Crop, ratio: Sequence[float] = RATIO
) -> tuple[int, int, Box] | None:
    """Returns (width, height, box of the crop) of an image that the device decodes: a plain, flawless baseline JPEG of
    at most LARGEST pixels. Returns None for any other image, without a draw: nvJPEG does not tell a half-grey one from
    a whole one. Raises BadSample for a box that is not inside of the image."""
    wh = plain_jpeg(encoded, min(max_pixels, LARGEST))
    if wh is None or not _is_baseline(encoded) or encoded.find(b"\xff\xd9", -_TAIL) < 0 or fault_of(encoded, "GRAY"):
        return None
    return *wh, box_of(crop, wh, scale, ratio)


def _is_baseline(encoded: bytes) -> bool:
    """Returns whether a JPEG is sequential with 8 bits and Huffman codes, not in RGB. Its header is well-formed."""
    baseline = False
    for kind, start, _ in segments(encoded):
        if kind == SCAN:
            return baseline
        if kind == ADOBE and encoded[start + 4 : start + 9] == b"Adobe" and encoded[start + 15 : start + 16] != b"\1":
            return False  # no YCbCr, which nvJPEG converts from
        baseline = baseline or kind == _BASELINE
    return False
