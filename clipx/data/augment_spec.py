"""Options of random changes of training samples: colours, RandAugment and erasing of images, words of captions."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum

from clipx.config.options import option
from clipx.config.specs import frozen

MAGNITUDES = 30  # largest magnitude of RandAugment, as in torchvision


@frozen
class ColorJitterSpec:
    """Random changes of brightness, contrast, saturation and hue, in random order, as torchvision's ColorJitter.

    The default strengths are those that open_clip documents, with the probability 0.8. Off by default.
    """

    probability: float = option(0.0, ge=0, le=1, when="brightness or contrast or saturation or hue")
    """Probability with which the colours of an image are changed. 0: never."""

    brightness: float = option(0.32, ge=0, le=10, when="probability", hint="0 for no change, 0.32 is usual")
    """Strength b of brightness: its factor is drawn from [max(0, 1 - b), 1 + b]."""

    contrast: float = option(0.32, ge=0, le=10, when="probability", hint="0 for no change, 0.32 is usual")
    """Strength c of contrast: its factor is drawn from [max(0, 1 - c), 1 + c]."""

    saturation: float = option(0.32, ge=0, le=10, when="probability", hint="0 for no change, 0.32 is usual")
    """Strength s of saturation: its factor is drawn from [max(0, 1 - s), 1 + s]."""

    hue: float = option(0.08, ge=0, le=0.5, when="probability", hint="0 for no change, 0.08 is usual")
    """Strength h of hue: a shift is drawn from [-h, h], as a share of the circle of colours. Hue takes three quarters
    of the time of all four."""


@frozen
class RandAugmentSpec:
    """RandAugment (arXiv:1909.13719) with the operations and strengths of torchvision's. Off by default."""

    operations: int = option(0, ge=0, le=14, hint="0 for none, 2 is usual")
    """Number of operations on each image, drawn with replacement from 14; 2 is usual. 0: none."""

    magnitude: int = option(9, ge=0, le=MAGNITUDES, when="operations")
    """Strength of all operations."""


@frozen
class AugmentSpec:
    """Random changes of training images after the crop, in the order of these options. Off by default.

    The draws are a function of the seed and of the sample's position, so they depend on neither workers nor ranks.
    """

    flip: float = option(0.0, ge=0, le=1)
    """Probability of a horizontal flip. Captions with left and right then contradict the image. 0: never."""

    rand_augment: RandAugmentSpec = field(default_factory=RandAugmentSpec)
    """RandAugment: a number of random operations on geometry and colours."""

    color_jitter: ColorJitterSpec = field(default_factory=ColorJitterSpec)
    """Color jitter: random brightness, contrast, saturation and hue."""

    grayscale: float = option(0.0, ge=0, le=1)
    """Probability of a conversion to grey. 0: never."""

    erase: float = option(0.0, ge=0, le=1)
    """Probability of random erasing (arXiv:1708.04896): a rectangle of 2 to 33 % of the image's area and an aspect
    ratio of 0.3 to 3.3 gets the color model.image.mean. 0: never."""

    @property
    def active(self) -> bool:
        """True if an image may be changed."""
        return self != AugmentSpec()


class CaptionRule(StrEnum):
    """Rule that selects the words of a caption."""

    truncate = "truncate"
    """The first words."""

    block = "block"
    """Consecutive words from a random one on."""

    random = "random"
    """Random words, in their order."""

    syntax = "syntax"
    """Nouns first, then adjectives, verbs and all others; the earlier ones of a kind, in their order. English."""


@frozen
class CaptionMaskSpec:
    """Words that are kept of a training caption (CLIPA, arXiv:2305.07017).

    The draws are a function of the seed and of the sample's position.
    """

    rule: CaptionRule = option(CaptionRule.truncate, when="objective.reads_text")
    """Rule that selects the words: truncate (the first ones), block (consecutive ones), random (any, in their order) or
    syntax (nouns first, then adjectives, verbs and others), which needs the package HanTa."""

    share: float = option(1.0, gt=0, le=1, when="objective.reads_text", hint="1 keeps what fits into the context")
    """Share of a caption's tokens that is kept; at least one word. 1: all that fit into the context."""

    tokens: int | None = option(None, ge=1, when="objective.reads_text", hint="null keeps what fits into the context")
    """Largest number of tokens that are kept of a caption, without start and end. null: those that fit into
    model.text.context_length."""

    @property
    def active(self) -> bool:
        """True if a caption may get other tokens than its first ones."""
        return self != CaptionMaskSpec()
