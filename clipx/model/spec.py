"""Options of a model: two towers that return unit embeddings, and a decoder where it captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Duration, Length
from clipx.config.registry import MISSING, option
from clipx.errors import require
from clipx.model.tower_spec import DecoderSpec, Gelu, ImageTowerSpec, Pool, Projection, TextTowerSpec

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP
    from clipx.model.coca import CoCa


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
    weights: str | None = None  # to begin with: a run, a file or a folder, see docs/weights.md; null: drawn at random
    patch_dropout: float = 0.0  # share of an image's patches that training leaves out (arXiv:2212.00794)
    patch_dropout_schedule: Course = Course.constant  # linear, cosine: from patch_dropout to patch_dropout_end
    patch_dropout_end: float = 0.0
    patch_dropout_final: str = "none"  # a duration, or a share of the run (5%), at its end and without patch dropout
    captions: ClassVar[bool] = False
    """Whether it has a decoder, and gives each caption's loss besides the embeddings."""

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

    @property
    def lock_options(self) -> str:
        """The `lock` options that are set, for the log."""
        towers = (("image", self.image), ("text", self.text))
        return ", ".join(f"{name}.lock={tower.lock}" for name, tower in towers if tower.lock != "none")

    def check_freezing(self, objective_learns: bool, lr_scales: Mapping[str, float]) -> None:
        """Raises ConfigError where randomly initialised weights are frozen, or nothing is left to train.

        `objective_learns`: whether the objective has weights that are worth training alone. `lr_scales`: the towers'
        learning rates as multiples of the model's.
        """
        frozen = []
        for name, tower in (("image", self.image), ("text", self.text)):
            require(
                tower.lock == "none" or self.weights is not None,
                f"model.{name}.lock={tower.lock} keeps weights that are drawn at random: give model.weights=…, or "
                "leave it out",
            )
            if tower.frozen:
                frozen.append(name)
                scale = lr_scales[name]
                require(
                    scale == 1,
                    f"optimizer.{name}_lr_scale={scale:g} has no effect on model.{name}.lock=all: leave one out",
                )
        require(
            len(frozen) < 2 or objective_learns,
            "model.image.lock=all and model.text.lock=all leave nothing to learn: lock one of them, or all but some "
            "blocks by a number",
        )

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
        course = _COURSES[self.patch_dropout_schedule]
        return lambda seen: 0.0 if final and seen >= span else start + (end - start) * course(seen / span)

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        raise NotImplementedError


# Progress from 0 to 1 at a share of the time.
_COURSES: dict[Course, Callable[[float], float]] = {
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
        require(
            not self.quick_gelu or self.text.gelu is Gelu.exact,
            f"model.text.gelu={self.text.gelu} has no effect with model.quick_gelu=true: leave one out",
        )

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        """The model with initial weights, on `device` ("meta" included). Raises ConfigError for an unknown tower, and
        for one that does not take what is `varying`."""
        from clipx.model.clip import CLIP

        return CLIP(self, device=device, dtype=dtype, varying=varying)


@option("model")
@dataclass(kw_only=True, slots=True)
class CoCaSpec(ClipSpec):
    """Two towers, and a decoder that captions (CoCa, arXiv:2205.01917, in open_clip's form)."""

    kind: str = "coca"
    queries: int = 256  # that pool an image's tokens: the first gives the embedding, the others what the decoder reads
    pool_heads: int = 8
    decoder: DecoderSpec = MISSING
    captions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ClipSpec.__post_init__(self)
        require(self.queries >= 2, f"model.queries={self.queries} must be at least 2: one embeds, the others caption")
        width = self.text.width
        require(
            self.embed_dim == width,
            f"model.embed_dim={self.embed_dim} is not model.text.width={width}, and the decoder reads image and text "
            "side by side: give both the same",
        )
        for key, heads in (("pool_heads", self.pool_heads), ("decoder.heads", self.decoder.heads)):
            require(
                heads >= 1 and width % heads == 0,
                f"model.{key}={heads} does not divide model.embed_dim={width}: give a divisor, as 8 of 512",
            )
        require(
            self.text.causal and self.text.pool is Pool.end and self.text.tokenizer == "clip",
            f"model.kind=coca foretells CLIP's tokens from those before them: leave out model.text.causal="
            f"{str(self.text.causal).lower()}, pool={self.text.pool} and tokenizer={self.text.tokenizer}",
        )
        require(
            self.image.projection is Projection.linear,
            f"model.image.projection={self.image.projection} does not go with model.kind=coca, whose pool has its own: "
            "leave it out",
        )

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CoCa:
        from clipx.model.coca import CoCa

        return CoCa(self, device=device, dtype=dtype, varying=varying)
