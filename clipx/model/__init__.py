"""Models: two towers that return unit embeddings. Spec here; towers in `vision`, `text`, put together in `clip`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from clipx.config import MISSING, option
from clipx.errors import require
from clipx.schedule import Duration, Length

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP
    from clipx.model.tokenizer import Tokenizer


# What makes timm.create_model open files, pickled ones too.
_FILES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


@dataclass(kw_only=True, slots=True)
class ImageTowerSpec:
    """An image tower from timm, by any name timm knows, and a linear projection to the embedding."""

    timm: str = MISSING  # a name from timm.list_models()
    size: int = 224  # pixels, square
    options: dict[str, Any] = field(default_factory=dict)  # passed on to timm.create_model
    mean: list[float] = field(default_factory=lambda: [0.48145466, 0.4578275, 0.40821073])  # of RGB in [0, 1]
    std: list[float] = field(default_factory=lambda: [0.26862954, 0.26130258, 0.27577711])
    checkpointing: str = "none"  # what the backward pass computes again, to save memory: 1 every block, 2 every second
    # one, and so on; selective: of every block all but its matrix products; tower: the tower at once

    def __post_init__(self) -> None:
        _check_checkpointing("image", self.checkpointing)
        require(self.size >= 8, f"model.image.size={self.size} is too small: give at least 8 pixels")
        for name, values in (("mean", self.mean), ("std", self.std)):
            require(len(values) == 3, f"model.image.{name}={values} must have 3 values, one each for R, G and B")
        require(
            not _FILES & self.options.keys(),
            f"model.image.options={self.options} has one of {', '.join(sorted(_FILES))}, by which timm reads weights "
            "from files: leave it out, a tower is made of arguments alone",
        )
        require(min(self.std) > 0, f"model.image.std={self.std} must be above 0")


@dataclass(kw_only=True, slots=True)
class TextTowerSpec:
    """A causal transformer over CLIP's byte pairs; the embedding is taken at the end token (arXiv:2103.00020)."""

    context_length: int = 77  # tokens, start and end included
    width: int = 512
    heads: int = 8
    layers: int = 12
    mlp_ratio: float = 4.0
    packed: bool = True  # computes nothing after a text's end token, where it would have no effect on the embedding
    checkpointing: str = "none"  # as the image tower's

    def __post_init__(self) -> None:
        _check_checkpointing("text", self.checkpointing)
        require(
            self.context_length >= 3,
            f"model.text.context_length={self.context_length} must be at least 3: start, one token, end",
        )
        for name, value in (("width", self.width), ("heads", self.heads), ("layers", self.layers)):
            require(value >= 1, f"model.text.{name}={value} must be at least 1")
        require(self.mlp_ratio > 0, f"model.text.mlp_ratio={self.mlp_ratio} must be above 0: 4 is usual")
        require(
            self.width % self.heads == 0,
            f"model.text.width={self.width} is not divisible by model.text.heads={self.heads}: "
            f"use width {self.width // self.heads * self.heads or self.heads}",
        )

    def build_tokenizer(self) -> Tokenizer:
        from clipx.model.tokenizer import Tokenizer

        return Tokenizer(self.context_length)


def _check_checkpointing(tower: str, value: str) -> None:
    require(
        value in ("none", "selective", "tower") or (value.isdecimal() and int(value) >= 1),
        f"model.{tower}.checkpointing={value} is not a choice: give none, selective, tower, or a number from 1, as 2 "
        "for every second block",
    )


class Course(StrEnum):
    """How a value goes from its start to its end."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(frozen=True, slots=True)
class Varying:
    """What of the image tower changes while a run trains; the weights are the same whatever does."""

    patch_dropout: bool = False
    sizes: tuple[int, ...] = ()  # of images, pixels, besides model.image.size


FIXED = Varying()


@dataclass(kw_only=True, slots=True)
class ModelSpec:
    kind: str = MISSING
    name: str = MISSING  # shown in run names and reports
    image: ImageTowerSpec = MISSING
    text: TextTowerSpec = MISSING
    weights: str | None = None  # to begin with: a run directory; null: drawn at random
    patch_dropout: float = 0.0  # share of an image's patches that training leaves out (arXiv:2212.00794)
    patch_dropout_schedule: Course = Course.constant  # linear, cosine: from patch_dropout to patch_dropout_end
    patch_dropout_end: float = 0.0
    patch_dropout_final: str = "none"  # a duration, or a share of the run (5%), at its end and without patch dropout

    def __post_init__(self) -> None:
        start, end = self.patch_dropout, self.patch_dropout_end
        for key, share in (("patch_dropout", start), ("patch_dropout_end", end)):
            require(0 <= share < 1, f"model.{key}={share} must lie in [0, 1): 0.5 leaves out half of the patches")
        if self.patch_dropout_schedule is Course.constant:
            require(
                end == 0,
                f"model.patch_dropout_end={end} has no effect with model.patch_dropout_schedule=constant: choose "
                "linear or cosine",
            )
        else:
            require(
                start != end,
                f"model.patch_dropout_schedule={self.patch_dropout_schedule} has no effect from model.patch_dropout="
                f"{start} to model.patch_dropout_end={end}: give two values",
            )
        if self.patch_dropout_final == "none":
            return
        text = self.patch_dropout_final
        final = Duration.parse(text, "model.patch_dropout_final (or none)", share=True)
        require(
            final.value > 0 and self.drops_patches,
            f"model.patch_dropout_final={text} has no effect with model.patch_dropout={start}: write none",
        )

    @property
    def drops_patches(self) -> bool:
        return (self.patch_dropout, self.patch_dropout_end) != (0, 0)

    def check_fits(self, duration: str, length: Length) -> None:
        """Raises ConfigError where the final phase is all of the run of `duration`.

        At composition `length` has no epoch yet, and a phase in another unit than the run passes.
        """
        if self.patch_dropout_final == "none":
            return
        final = Duration.parse(self.patch_dropout_final, "model.patch_dropout_final", share=True)
        share = final.share(Duration.parse(duration, "duration"), length)
        require(
            share is None or share < 1,
            f"model.patch_dropout_final={self.patch_dropout_final} is all of duration={duration}: shorten it, or train "
            "with model.patch_dropout=0",
        )

    def patch_dropout_over(self, length: Length) -> Callable[[int], float]:
        """Samples seen before a step -> the share of an image's patches that this step leaves out."""
        final = 0
        if self.patch_dropout_final != "none":
            final = Duration.parse(self.patch_dropout_final, "model.patch_dropout_final", share=True).samples(length)
        start, end, span = self.patch_dropout, self.patch_dropout_end, length.total - final
        way = _WAYS[self.patch_dropout_schedule]
        return lambda seen: 0.0 if final and seen >= span else start + (end - start) * way(seen / span)

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        raise NotImplementedError


# The way that is gone, from 0 to 1, at a share of the time.
_WAYS: dict[Course, Callable[[float], float]] = {
    Course.constant: lambda t: 0.0,
    Course.linear: lambda t: min(1.0, t),
    Course.cosine: lambda t: 0.5 - 0.5 * math.cos(math.pi * min(1.0, t)),
}


@option("model")
@dataclass(kw_only=True, slots=True)
class ClipSpec(ModelSpec):
    """Two towers into one embedding space (CLIP, arXiv:2103.00020)."""

    kind: str = "clip"
    embed_dim: int = 512
    quick_gelu: bool = False  # x·sigmoid(1.702x), as in OpenAI's weights; must match the weights one loads

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        require(self.embed_dim >= 1, f"model.embed_dim={self.embed_dim} must be at least 1")

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        """The model with initial weights, on `device` ("meta" included). Raises ConfigError for an unknown tower, and
        for one that does not take what is `varying`."""
        from clipx.model.clip import CLIP

        return CLIP(self, device=device, dtype=dtype, varying=varying)
