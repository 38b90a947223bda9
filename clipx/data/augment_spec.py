"""Options of image augmentation: random crops, flips, colours, RandAugment and erasing of training images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from clipx.config.specs import frozen
from clipx.errors import require

MAGNITUDES = 30
"""Largest magnitude of RandAugment, as in torchvision."""


@frozen
class ColorJitterSpec:
    """Random changes of brightness, contrast, saturation and hue, in random order, as torchvision's ColorJitter.

    The default strengths are those that open_clip documents, with the probability 0.8. Off by default.
    """

    probability: float = 0.0
    """Probability with which the colours of an image are changed, in [0, 1]. 0: never."""

    brightness: float = 0.32
    """Strength b of brightness, 0 or more: its factor is drawn from [max(0, 1 - b), 1 + b]."""

    contrast: float = 0.32
    """Strength c of contrast, 0 or more: its factor is drawn from [max(0, 1 - c), 1 + c]."""

    saturation: float = 0.32
    """Strength s of saturation, 0 or more: its factor is drawn from [max(0, 1 - s), 1 + s]."""

    hue: float = 0.08
    """Strength h of hue, in [0, 0.5]: a shift is drawn from [-h, h], as a share of the circle of colours. Hue takes
    three quarters of the time of all four."""

    def __post_init__(self) -> None:
        _check_probability("color_jitter.probability", self.probability)
        usual = {"brightness": (10, 0.32), "contrast": (10, 0.32), "saturation": (10, 0.32), "hue": (0.5, 0.08)}
        for name, (most, often) in usual.items():
            value = getattr(self, name)
            require(
                0 <= value <= most,
                f"data.augment.color_jitter.{name}={value} must be in [0, {most}]: 0 for no change, {often} is usual",
            )
        require(
            any(getattr(self, name) for name in usual) or not self.probability,
            f"data.augment.color_jitter.probability={self.probability} has no effect with all strengths 0: give one, "
            "or remove it",
        )


@frozen
class RandAugmentSpec:
    """RandAugment (arXiv:1909.13719) with the operations and strengths of torchvision's. Off by default."""

    operations: int = 0
    """Number of operations on each image, drawn with replacement from 14, in [0, 14]; 2 is usual. 0: none."""

    magnitude: int = 9
    """Strength of all operations, in [0, 30]."""

    def __post_init__(self) -> None:
        for name, most, usual in (("operations", 14, "0 for none, 2"), ("magnitude", MAGNITUDES, "9")):
            value = getattr(self, name)
            require(
                0 <= value <= most, f"data.augment.rand_augment.{name}={value} must be in [0, {most}]: {usual} is usual"
            )


@frozen
class AugmentSpec:
    """Random changes of training images after the crop, in the order of these options. Off by default.

    The draws are a function of the seed and of the sample's position, so they depend on neither workers nor ranks.
    """

    flip: float = 0.0
    """Probability of a horizontal flip, in [0, 1]. Captions with left and right then contradict the image. 0: never."""

    rand_augment: RandAugmentSpec = field(default_factory=RandAugmentSpec)
    """RandAugment: a number of random operations on geometry and colours."""

    color_jitter: ColorJitterSpec = field(default_factory=ColorJitterSpec)
    """Color jitter: random brightness, contrast, saturation and hue."""

    grayscale: float = 0.0
    """Probability of a conversion to grey, in [0, 1]. 0: never."""

    erase: float = 0.0
    """Probability of random erasing (arXiv:1708.04896), in [0, 1]: a rectangle of 2 to 33 % of the image's area and an
    aspect ratio of 0.3 to 3.3 gets the color model.image.mean. 0: never."""

    def __post_init__(self) -> None:
        for name in ("flip", "grayscale", "erase"):
            _check_probability(name, getattr(self, name))
        for key, off, switch, default in (
            ("rand_augment", not self.rand_augment.operations, "operations", RandAugmentSpec()),
            ("color_jitter", not self.color_jitter.probability, "probability", ColorJitterSpec()),
        ):
            found = getattr(self, key)
            require(
                not off or found == default,
                f"data.augment.{key}={{{_changed(found, default)}}} has no effect with {switch}=0: give "
                f"data.augment.{key}.{switch}, or remove it",
            )

    @property
    def active(self) -> bool:
        """True if an image may be changed."""
        return self != AugmentSpec()


def _changed(found: object, default: object) -> str:
    """Returns the options of a spec that differ from the default, as on the command line."""
    values = ((name, getattr(found, name)) for name in type(found).__slots__)  # type: ignore[attr-defined]
    return ",".join(f"{name}:{value}" for name, value in values if value != getattr(default, name))


def _check_probability(name: str, value: float) -> None:
    require(0 <= value <= 1, f"data.augment.{name}={value} must be a probability in [0, 1]: 0 for never")


def check_crops(scale: Sequence[float], ratio: Sequence[float]) -> None:
    """Checks data.crop_scale and data.crop_ratio. Raises ConfigError."""
    require(
        len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1,
        f"data.crop_scale={scale} must be [low, high] with 0 < low ≤ high ≤ 1, e.g. [0.9,1.0]",
    )
    require(
        len(ratio) == 2 and 0.01 <= ratio[0] <= ratio[1] <= 100,
        f"data.crop_ratio={ratio} must be [low, high] with 0.01 ≤ low ≤ high ≤ 100, e.g. [0.75,1.3333]",
    )
