"""Image augmentation by torchvision's functions, with parameters drawn from a generator of the sample's position.

Loader processes call them on Pillow images, where they are faster, the device of data.decode=gpu on tensors.

Shape suffix: S side of an image in pixels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torchvision.transforms.v2.functional as F
from PIL import Image
from torch import Tensor

from clipx.data.augment_spec import MAGNITUDES, AugmentSpec, ColorJitterSpec, RandAugmentSpec

_AREA, _RATIO, _TRIES = (0.02, 0.33), (0.3, 3.3), 10  # of erased rectangles: torchvision's defaults
_SHIFT = 150 / 331  # largest translation, as a share of the image's side

Picture = TypeVar("Picture", Image.Image, Tensor)
Rectangle = tuple[float, float, float, float]  # (left, top, right, bottom) as shares of the image's side


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Drawn changes of an image, which do not depend on its size."""

    flip: bool
    operations: Sequence[tuple[str, float]]  # operations by name, each with its strength, in the order of their use
    erased: Rectangle | None

    @classmethod
    def draw(cls, spec: AugmentSpec, rng: random.Random) -> Augmentation:
        flip = rng.random() < spec.flip
        operations = [_rand_augment(spec.rand_augment, rng) for _ in range(spec.rand_augment.operations)]
        if rng.random() < spec.color_jitter.probability:
            operations += _color_jitter(spec.color_jitter, rng)
        if rng.random() < spec.grayscale:
            operations.append(("grayscale", 1.0))
        return cls(flip, operations, _rectangle(rng) if rng.random() < spec.erase else None)

    def apply(self, row_SS3: Tensor, fill: Sequence[int], on_device: bool = False) -> None:
        """Changes an image in host memory by Pillow. `fill`: colour of pixels without content. `on_device`: by tensor
        operations, which differ by rounding, and in hue by up to 12 of 255 levels."""
        if self.flip:
            row_SS3.copy_(row_SS3.flip(1))
        if self.operations and on_device:
            image_3SS = self._operated(row_SS3.permute(2, 0, 1).contiguous(), fill)
            row_SS3.copy_(image_3SS.permute(1, 2, 0))
        elif self.operations:
            image = self._operated(Image.fromarray(row_SS3.numpy()), fill)
            row_SS3.copy_(torch.from_numpy(np.array(image)))
        if self.erased is not None:
            left, top, right, bottom = (round(share * len(row_SS3)) for share in self.erased)
            for channel, level in enumerate(fill):
                row_SS3[top:bottom, left:right, channel] = level

    def _operated(self, image: Picture, fill: Sequence[int]) -> Picture:
        for name, strength in self.operations:
            image = _FUNCTIONS[name](image, strength, list(fill))
        return image


# --------------------------------------------------------------------------------------------------------------- draws


def _color_jitter(spec: ColorJitterSpec, rng: random.Random) -> list[tuple[str, float]]:
    """Draws the strengths of color jitter, and their order. A factor f has the strength f - 1."""
    strengths = {"brightness": spec.brightness, "contrast": spec.contrast, "color": spec.saturation}
    drawn = [(name, rng.uniform(max(-1.0, -most), most)) for name, most in strengths.items() if most]
    if spec.hue:
        drawn.append(("hue", rng.uniform(-spec.hue, spec.hue)))
    rng.shuffle(drawn)
    return drawn


def _rand_augment(spec: RandAugmentSpec, rng: random.Random) -> tuple[str, float]:
    """Draws one of OPERATIONS, and the sign of its strength."""
    name, sign = rng.choice(list(OPERATIONS)), rng.choice((1, -1))
    return name, strength_of(name, spec.magnitude) * (sign if OPERATIONS[name].signed else 1)


def _rectangle(rng: random.Random) -> Rectangle | None:
    """Draws the rectangle of torchvision's RandomErasing, before its rounding to pixels. Returns None if ten of them do
    not fit into the image."""
    for _ in range(_TRIES):
        area, ratio = rng.uniform(*_AREA), math.exp(rng.uniform(*map(math.log, _RATIO)))
        height, width = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if max(height, width) < 1:
            left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
            return left, top, left + width, top + height
    return None


# ---------------------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation of RandAugment: its strengths at the magnitudes 0 and MAGNITUDES, and whether its sign is drawn."""

    first: float
    last: float
    signed: bool
    call: Callable[[Any, float, list[int]], Any]
    """Function of the image, the strength and the colour of pixels without content."""


def strength_of(name: str, magnitude: int) -> float:
    """Returns the strength of an operation of RandAugment at a magnitude, in [0, MAGNITUDES]."""
    return _spaced(OPERATIONS[name].first, OPERATIONS[name].last, magnitude)


def _spaced(first: float, last: float, magnitude: int) -> float:
    """Returns a number between two, as torchvision rounds it: one ulp changes whole levels of an image."""
    return float(torch.linspace(first, last, MAGNITUDES + 1, dtype=torch.float32)[magnitude])


def _sheared(image: Any, x: float, y: float, fill: list[int]) -> Any:
    angles = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
    return F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=angles, fill=fill, center=[0, 0])


def _translated(image: Any, x: float, y: float, fill: list[int]) -> Any:
    """Moves an image by signed magnitudes, whose pixels depend on its sides."""
    height, width = F.get_size(image)
    pixels = [int(math.copysign(_spaced(0, _SHIFT * side, int(abs(m))), m)) for m, side in ((x, width), (y, height))]
    return F.affine(image, angle=0.0, translate=pixels, scale=1.0, shear=[0.0, 0.0], fill=fill)


OPERATIONS = {
    "identity": Operation(0, 0, False, lambda image, strength, fill: image),
    "shear_x": Operation(0, 0.3, True, lambda image, strength, fill: _sheared(image, strength, 0, fill)),
    "shear_y": Operation(0, 0.3, True, lambda image, strength, fill: _sheared(image, 0, strength, fill)),
    "translate_x": Operation(0, MAGNITUDES, True, lambda image, strength, fill: _translated(image, strength, 0, fill)),
    "translate_y": Operation(0, MAGNITUDES, True, lambda image, strength, fill: _translated(image, 0, strength, fill)),
    "rotate": Operation(0, 30, True, lambda image, strength, fill: F.rotate(image, strength, fill=fill)),
    "brightness": Operation(0, 0.9, True, lambda image, strength, fill: F.adjust_brightness(image, 1 + strength)),
    "color": Operation(0, 0.9, True, lambda image, strength, fill: F.adjust_saturation(image, 1 + strength)),
    "contrast": Operation(0, 0.9, True, lambda image, strength, fill: F.adjust_contrast(image, 1 + strength)),
    "sharpness": Operation(0, 0.9, True, lambda image, strength, fill: F.adjust_sharpness(image, 1 + strength)),
    "posterize": Operation(8, 4, False, lambda image, strength, fill: F.posterize(image, round(strength))),
    "solarize": Operation(1, 0, False, lambda image, strength, fill: F.solarize(image, 255 * strength)),
    "auto_contrast": Operation(0, 0, False, lambda image, strength, fill: F.autocontrast(image)),
    "equalize": Operation(0, 0, False, lambda image, strength, fill: F.equalize(image)),
}
"""The operations of torchvision's RandAugment (transforms.v2). Geometry takes the nearest pixel, as there."""

_FUNCTIONS: dict[str, Callable[[Any, float, list[int]], Any]] = {
    **{name: operation.call for name, operation in OPERATIONS.items()},
    "hue": lambda image, strength, fill: F.adjust_hue(image, strength),
    "grayscale": lambda image, strength, fill: F.rgb_to_grayscale(image, num_output_channels=3),
}
