"""Views: what the image tower of a model reads of a sample, and its layout in a batch.

An image is read as uint8 pixels (in patches: see clipx.data.patches), stored features (.npy) as float32 numbers.

Shape suffixes: n samples, S side of an image in pixels, F stored features of a sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipx.data.augment_spec import AugmentSpec
from clipx.data.shared_memory import empty_rows
from clipx.data.source import BadSample
from clipx.data.spec import DataSpec, Decoder, check_takes_features
from clipx.data.transform import RATIO, Box, Crop, decode, eval_transform, train_transform
from clipx.model.tower_spec import ImageTowerSpec, Interpolation

if TYPE_CHECKING:
    from clipx.data.encoded import DeviceCrop


class View(Protocol):
    """Input of an image tower, read from the encoded image or the stored features of a sample."""

    @property
    def on_device(self) -> bool:
        """Returns whether the device decodes images (data.decode=gpu)."""

    def allocate(self, samples: int, second_size: int | None = None) -> list[Tensor]:
        """Returns uninitialised tensors for the inputs of so many samples, sample by sample.

        The first is for this view; the second, with `second_size`, for the same crops in another size, in pixels. In a
        loader process they are valid until the next call: see empty_rows.
        """

    def device_crop(self, encoded: bytes, crop: Crop) -> DeviceCrop | None:
        """Returns the crop of a training sample that the device decodes; None for one that `load` has to read.

        Raises BadSample.
        """

    def load(self, encoded: bytes, crop: Crop, *outs: Tensor) -> Box | None:
        """Reads a training sample into its row of each allocated tensor. Raises BadSample.

        Returns the box of the crop; None for a view without crops.
        """

    def augment(self, seed: str, *outs: Tensor, on_device: bool = False) -> None:
        """Changes a training sample in its row of each tensor, by the draws of a generator of this seed.

        `on_device`: by tensor operations. No operation for a view without augmentation.
        """

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        """Returns the row of an evaluation sample. Raises BadSample."""

    def batch(self, rows: Tensor) -> Tensor:
        """Returns rows as the model takes them."""

    def for_data(self, data: DataSpec) -> View:
        """Returns the view with the limits of other data."""


def view_of(image: ImageTowerSpec, data: DataSpec, size: int | None = None) -> View:
    """Returns the view of a model on data. `size`: side of the images in pixels. None: model.image.size.

    Raises ConfigError for an option of images that is set for stored features.
    """
    if image.native:
        from clipx.data.patches import PatchView

        return PatchView(image.patch, image.max_tokens, data.crop_scale, data.max_pixels, image.interpolation)
    if image.features is None:
        on_device = data.decode == Decoder.gpu
        return ImageView(
            size or image.size,
            data.crop_scale,
            data.max_pixels,
            image.stretch,
            image.interpolation,
            on_device,
            tuple(data.crop_ratio),
            data.augment if data.augment.active else None,
            tuple(min(255, max(0, round(255 * mean))) for mean in image.normalization["mean"]),
        )
    check_takes_features(data)
    return FeatureView(image.features)


@dataclass(frozen=True, slots=True)
class ImageView:
    """Squares of `size` pixels. Training crops have an area share within `crop_scale`.

    Rows are [S, S, 3] uint8, and a batch of them is [n, 3, S, S] in channels-last memory: the layout of decoded pixels,
    and the one that convolutions prefer.
    """

    size: int
    crop_scale: Sequence[float]
    max_pixels: int
    stretch: bool = False  # model.image.stretch; evaluation only
    interpolation: Interpolation = Interpolation.bicubic
    on_device: bool = False  # training only
    crop_ratio: Sequence[float] = RATIO
    augmentation: AugmentSpec | None = None  # training only
    fill: Sequence[int] = (123, 117, 104)  # colour of pixels without content after augmentation

    def sizes(self, second_size: int | None) -> list[int]:
        """Returns the sides of the images of a batch: a second view of the same size has the same images."""
        return [self.size] if second_size is None or second_size == self.size else [self.size, second_size]

    def allocate(self, samples: int, second_size: int | None = None) -> list[Tensor]:
        return [empty_rows((samples, size, size, 3), torch.uint8) for size in self.sizes(second_size)]

    def device_crop(self, encoded: bytes, crop: Crop) -> DeviceCrop | None:
        if not self.on_device:
            return None
        from clipx.data.encoded import device_crop

        return device_crop(encoded, self.crop_scale, self.max_pixels, crop, self.crop_ratio)

    def load(self, encoded: bytes, crop: Crop, *outs: Tensor) -> Box:
        return train_transform(
            encoded,
            self.crop_scale,
            self.max_pixels,
            crop,
            *outs,
            interpolation=self.interpolation,
            ratio=self.crop_ratio,
        )

    def augment(self, seed: str, *outs: Tensor, on_device: bool = False) -> None:
        if self.augmentation is None:
            return
        from clipx.data.augment import Augmentation  # torchvision's functions take a second to import

        drawn = Augmentation.draw(self.augmentation, random.Random(seed))
        for out in outs:
            (drawn.apply_on_device if on_device else drawn.apply)(out, self.fill)

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        image = decode(encoded, self.max_pixels)
        return torch.tensor(eval_transform(image, self.size, self.stretch, self.interpolation))

    def batch(self, rows: Tensor) -> Tensor:
        return rows.permute(0, 3, 1, 2)

    def for_data(self, data: DataSpec) -> ImageView:
        return replace(self, max_pixels=data.max_pixels)


@dataclass(frozen=True, slots=True)
class FeatureView:
    """Stored features: `width` numbers of each sample. Rows are [F] float32, and a batch of them is [n, F]."""

    width: int
    on_device: ClassVar[bool] = False

    def allocate(self, samples: int, second_size: int | None = None) -> list[Tensor]:
        assert second_size is None, "a teacher model reads images"
        return [empty_rows((samples, self.width), torch.float32)]

    def device_crop(self, encoded: bytes, crop: Crop) -> None:
        return None

    def load(self, encoded: bytes, crop: Crop, *outs: Tensor) -> None:
        outs[0].copy_(self.load_for_evaluation(encoded))

    def augment(self, seed: str, *outs: Tensor, on_device: bool = False) -> None:
        """Has no effect: stored features are not images."""

    def load_for_evaluation(self, encoded: bytes) -> Tensor:
        return torch.from_numpy(parse_features(encoded, self.width))

    def batch(self, rows: Tensor) -> Tensor:
        return rows

    def for_data(self, data: DataSpec) -> FeatureView:
        check_takes_features(data)
        return self


# ------------------------------------------------------------------------------------------------- stored features


def parse_features(encoded: bytes, width: int) -> NDArray[np.float32]:
    """Returns the `width` numbers of an .npy file of one row in float16, float32 or float64.

    Nothing is unpickled. Raises BadSample.
    """
    from clipx.data.image_format import NPY
    from clipx.data.npy import header_of

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


@dataclass(frozen=True, slots=True)
class Crops:
    """`count` random crops of each sample, with the distribution and the augmentation of training crops.

    A pure function of (seed, sample, number of the crop), for stored embeddings. The augmentation of a crop is a
    function of the same numbers, so it is not stored.
    """

    count: int
    seed: int

    def load(self, view: View, index: int, encoded: bytes) -> tuple[Tensor, Tensor]:
        """Returns the rows of the crops of sample `index`, and their boxes, [V, 4] int32. Raises BadSample."""
        (rows,) = view.allocate(self.count)
        boxes = [view.load(encoded, random.Random(f"{self.seed}/{index}/{v}"), row) for v, row in enumerate(rows)]
        for v, row in enumerate(rows):
            view.augment(crop_seed(self.seed, index, v), row)
        return rows.clone(), torch.tensor(boxes, dtype=torch.int32)  # cloned: `allocate` returns the same memory again


def crop_seed(seed: int, index: int, number: int) -> str:
    """Returns the seed of the augmentation of a crop of sample `index`."""
    return f"{seed}/{index}/{number}/augment"
