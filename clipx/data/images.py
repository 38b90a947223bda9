"""Readers of images: the encoded image of a sample becomes a row of the input of an image tower.

Shape suffixes: n samples, S side of an image in pixels, F stored features of a sample.
"""

from __future__ import annotations

import pkgutil
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipx.data.augment_spec import AugmentSpec
from clipx.data.decoders import decoder_of
from clipx.data.image_files import NPY
from clipx.data.inputs import Inputs
from clipx.data.npy import header_of
from clipx.data.shared_memory import empty_rows, shared_rows
from clipx.data.source import BadSample
from clipx.data.spec import DataSpec
from clipx.data.transform import RATIO, Box, Crop, decode, eval_transform, train_transform
from clipx.model.tower_spec import ImageTowerSpec, Interpolation

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


RowType = tuple[tuple[int, ...], torch.dtype]  # shape and type of the row of a sample


@dataclass(frozen=True, slots=True)
class Draw:
    """Random choices for an image of training: a crop and an augmentation."""

    crop: Crop
    seed: str  # of the augmentation
    number: int = 0  # of a crop that has stored targets


class ImageReader(ABC):
    """Reads images for an image tower. Pickled to loader processes. A batch has a row for each sample, which `load`
    fills in place. Subclasses are dataclasses; model.image names one."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def build(cls, image: ImageTowerSpec, data: DataSpec, size: int | None) -> Self:
        """Returns the reader for a tower and data. `size`: side of the images in pixels. None: model.image.size."""

    @abstractmethod
    def row_types(self) -> Sequence[RowType]:
        """Returns the row of a sample for the model, and for a live teacher if it reads another."""

    @abstractmethod
    def load(self, encoded: bytes, draw: Draw, *rows: Tensor) -> Box | None:
        """Reads an image of training into its rows. Raises BadSample. Returns the box of the crop; None for a kind of
        input without crops."""

    @abstractmethod
    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        """Returns the row of an image of evaluation for the model. Raises BadSample."""

    def for_data(self, data: DataSpec) -> Self:
        """Returns the reader with the limits of other data."""
        return self

    def for_training(self, data: DataSpec) -> ImageReader:
        """Returns the reader of training batches."""
        return self

    def check_device(self, device: torch.device) -> None:  # noqa: B027  # most kinds need nothing of a device
        """Raises ConfigError if the device cannot do its part of the reading."""

    def for_model(self, model: CLIP) -> Self:
        """Returns the reader with what it needs of a model that has been built."""
        return self

    def and_for(self, size: int) -> ImageReader:
        """Returns the reader of the same crops for a live teacher, too, that reads squares of `size` pixels."""
        raise NotImplementedError

    def blank(self, samples: int, noise: torch.Generator | None = None) -> Tensor:
        """Returns rows of zeros for the model, or of noise."""
        shape, dtype = self.row_types()[0]
        rows = torch.zeros((samples, *shape), dtype=dtype)
        if noise is not None:
            _ = rows.normal_(generator=noise) if dtype.is_floating_point else rows.random_(0, 256, generator=noise)
        return rows

    def sample_bytes(self) -> int:
        """Returns the bytes of a sample in a batch."""
        with torch.device("meta"):
            return sum(torch.empty(shape, dtype=dtype).nbytes for shape, dtype in self.row_types())

    def allocate(self, samples: int) -> Any:
        """Returns rows of so many samples, uninitialised. In a loader process they are valid until the next call."""
        return [empty_rows((samples, *shape), dtype) for shape, dtype in self.row_types()]

    def read(self, encoded: bytes, draw: Draw, rows: Any, place: int) -> Box | None:
        """Reads an image of training into the rows at a place. Raises BadSample; the place may then be used again."""
        return self.load(encoded, draw, *(some[place] for some in rows))

    def inputs(self, rows: Any) -> Inputs:
        """Returns rows in the form that the model takes, in memory that a loader process shares with the trainer."""
        return Inputs(tuple(map(shared_rows, rows)))


def reader_of(image: ImageTowerSpec, data: DataSpec, size: int | None = None) -> ImageReader:
    """Returns the reader of a tower's images from data. `size`: side of the images in pixels. None: model.image.size.
    Raises ConfigError for an option of images that has no effect on the input of the tower."""
    image.kind.check_data(data)
    reader: type[ImageReader] = pkgutil.resolve_name(image.kind.reader)
    return reader.build(image, data, size)


@dataclass(frozen=True, slots=True)
class PixelReader(ImageReader):
    """Squares of pixels. Training crops have an area share within `crop_scale`. Rows are [S, S, 3] uint8, and a batch
    of them is [n, 3, S, S] in channels-last memory: the layout of decoded pixels, and the one that convolutions
    prefer."""

    sizes: tuple[int, ...]  # of the model, and of a teacher that reads another size
    crop_scale: Sequence[float]
    max_pixels: int
    stretch: bool = False  # model.image.stretch; evaluation only
    interpolation: Interpolation = Interpolation.bicubic
    crop_ratio: Sequence[float] = RATIO
    augmentation: AugmentSpec | None = None  # training only
    fill: Sequence[int] = (123, 117, 104)  # colour of pixels without content after augmentation

    @classmethod
    def build(cls, image: ImageTowerSpec, data: DataSpec, size: int | None) -> Self:
        return cls(
            (size or image.size,),
            data.crop_scale,
            data.max_pixels,
            image.stretch,
            image.interpolation,
            tuple(data.crop_ratio),
            data.augment if data.augment.active else None,
            tuple(min(255, max(0, round(255 * mean))) for mean in image.normalization["mean"]),
        )

    def row_types(self) -> Sequence[RowType]:
        return [((size, size, 3), torch.uint8) for size in self.sizes]

    def load(self, encoded: bytes, draw: Draw, *rows: Tensor) -> Box:
        """Decodes, crops and resizes an image, then augments it."""
        box = train_transform(
            encoded,
            self.crop_scale,
            self.max_pixels,
            draw.crop,
            *rows,
            interpolation=self.interpolation,
            ratio=self.crop_ratio,
        )
        self.augment(draw.seed, rows)
        return box

    def augment(self, seed: str, rows: Sequence[Tensor], on_device: bool = False) -> None:
        """Changes the rows of a sample by the draws of a generator of this seed. `on_device`: by tensor operations."""
        if self.augmentation is None:
            return
        from clipx.data.augment import Augmentation  # torchvision's functions take a second to import

        drawn = Augmentation.draw(self.augmentation, random.Random(seed))
        for row_SS3 in rows:
            drawn.apply(row_SS3, self.fill, on_device)

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        image = decode(encoded, self.max_pixels)
        return torch.tensor(eval_transform(image, self.sizes[0], self.stretch, self.interpolation))

    def inputs(self, rows: Any) -> Inputs:
        return Inputs(tuple(shared_rows(rows_nSS3).permute(0, 3, 1, 2) for rows_nSS3 in rows))

    def for_data(self, data: DataSpec) -> Self:
        return replace(self, max_pixels=data.max_pixels)

    def and_for(self, size: int) -> Self:
        return self if size == self.sizes[0] else replace(self, sizes=(*self.sizes, size))

    def for_training(self, data: DataSpec) -> ImageReader:
        decoder = decoder_of(data.decode)
        if decoder is None:
            return self
        reader: ImageReader = pkgutil.resolve_name(decoder.reader).like(self)
        return reader


@dataclass(frozen=True, slots=True)
class Crops:
    """`count` random crops of each sample, with the distribution and the augmentation of training crops. A pure
    function of (seed, sample, number of the crop), for stored embeddings. The augmentation of a crop is a function of
    the same numbers, so it is not stored."""

    count: int
    seed: int

    def load(self, reader: ImageReader, index: int, encoded: bytes) -> tuple[Tensor, Tensor]:
        """Returns the rows of the crops of sample `index`, and their boxes, [V, 4] int32. Raises BadSample."""
        rows = reader.allocate(self.count)
        boxes = [
            reader.read(
                encoded, Draw(random.Random(f"{self.seed}/{index}/{v}"), crop_seed(self.seed, index, v)), rows, v
            )
            for v in range(self.count)
        ]
        return rows[0].clone(), torch.tensor(boxes, dtype=torch.int32)  # cloned: `allocate` returns the same memory


def crop_seed(seed: int, index: int, number: int) -> str:
    """Returns the seed of the augmentation of a crop of sample `index`."""
    return f"{seed}/{index}/{number}/augment"


# ---------------------------------------------------------------------------------------------- stored features


@dataclass(frozen=True, slots=True)
class FeatureReader(ImageReader):
    """Stored features: `width` numbers of each sample. Rows are [F] float32."""

    width: int

    @classmethod
    def build(cls, image: ImageTowerSpec, data: DataSpec, size: int | None) -> Self:
        assert image.features is not None
        return cls(image.features)

    def row_types(self) -> Sequence[RowType]:
        return [((self.width,), torch.float32)]

    def load(self, encoded: bytes, draw: Draw, *rows: Tensor) -> None:
        rows[0].copy_(self.load_for_evaluation(encoded))

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        return torch.from_numpy(parse_features(encoded, self.width))


def parse_features(encoded: bytes, width: int) -> NDArray[np.float32]:
    """Returns the `width` numbers of an .npy file of one row in float16, float32 or float64. Raises BadSample."""
    if not encoded.startswith(NPY):
        raise BadSample("image is not stored features (.npy)")
    try:
        shape, _, dtype, start = header_of(encoded)
    except Exception as error:  # numpy raises errors of several types on a damaged header
        raise BadSample(f"features have a damaged header: {' '.join(str(error).split())[:120]}") from None
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise BadSample(f"features are {dtype}, must be float16, float32 or float64")
    if len(shape) != 1:
        raise BadSample(f"features have shape {list(shape)}, must be one row")
    if shape[0] != width:
        raise BadSample(f"features have {shape[0]} numbers, model.image.features={width}")
    if len(encoded) - start != width * dtype.itemsize:
        raise BadSample(f"features have {len(encoded) - start} bytes of data, must be {width * dtype.itemsize}")
    with np.errstate(over="ignore"):
        row_F: NDArray[np.float32] = np.frombuffer(encoded, dtype, width, start).astype(np.float32)
    if not np.isfinite(row_F).all():
        raise BadSample("features have a value that is not finite in float32")
    return row_F
