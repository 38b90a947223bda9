"""Options of a model: an image tower and a text tower."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Duration, Length
from clipx.config.names import check_name
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import require, require_effect
from clipx.model.text_spec import TextTowerSpec
from clipx.model.tower_spec import ImageTowerSpec

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


class Course(StrEnum):
    """Shape of a schedule between its start value and its end value."""

    constant = "constant"
    """The start value throughout."""

    linear = "linear"
    """A straight line from the start value to the end value."""

    cosine = "cosine"
    """Half a cosine wave from the start value to the end value: slow at both ends."""


@dataclass(frozen=True, slots=True)
class Varying:
    """Properties of the image tower that change during training. They have no effect on its parameters."""

    patch_dropout: bool = False
    """True if training drops patches."""

    sizes: tuple[int, ...] = ()
    """Image sizes in pixels in addition to model.image.size."""


FIXED = Varying()


@frozen
class ModelSpec:
    """Options of every kind of model."""

    kind: str = MISSING
    """Kind of model: `clip`, an image tower and a text tower, or that of a feature or a plug-in, such as `coca`."""

    name: str = option(MISSING, check=check_name)
    """Name of the model, shown in run names and reports: at most 200 bytes, without / and control characters. It has no
    effect on training."""

    image: ImageTowerSpec = MISSING
    """Image tower: a timm architecture, or stored features, and its projection to the embedding."""

    text: TextTowerSpec = MISSING
    """Text tower: a transformer over tokens and its projection to the embedding."""

    weights: str | None = None
    """Initial weights of a new run: a run directory, one of its checkpoints, a folder with open_clip_config.json or of
    a CLIPModel of transformers, a file (.safetensors, .pt, .pth, .bin), a URL of any of these, or hf-hub:ORG/NAME.
    null: random initialization. A resumed run loads its checkpoint instead. See docs/guides/weights.md."""

    patch_dropout: float = option(0.0, ge=0, lt=1, hint="0.5 drops half of the patches")
    """Share of each image's patches that training drops at random (arXiv:2212.00794). 0: off. Evaluation uses all
    patches. Requires an image tower with patch dropout in timm, such as a ViT. With a linear or cosine schedule: the
    share at the start of the run. Cannot be combined with patch_dropout of a stage."""

    patch_dropout_schedule: Course = Course.constant
    """Course of patch_dropout over the run: constant, or linear or cosine from patch_dropout to patch_dropout_end. It
    ends where the phase patch_dropout_final begins."""

    patch_dropout_end: float = option(0.0, ge=0, lt=1, when="patch_dropout_schedule != constant")
    """Share of dropped patches at the end of a linear or cosine patch_dropout_schedule, different from
    patch_dropout."""

    patch_dropout_final: str = option("none", when="patch_dropout or patch_dropout_end")
    """Length of a phase without patch dropout at the end of the run: a duration (2ep, 1000st, 1e6sa) or a share of the
    run (5%), shorter than the run. none: no such phase."""

    outputs: ClassVar[str | None] = None
    """Further output of `forward`, after the embeddings, named in words for messages: "losses of captions". Objectives
    with equal `outputs` read it. None: none."""

    has_pooled_trunk: ClassVar[bool] = True
    """False for a model that pools the tokens of the image trunk itself, so that the trunk has no pooled features."""

    open_clip_layout: ClassVar[str | None] = None
    """Conversion to and from open_clip, a `clipx.weights.open_clip.Layout`, as MODULE:NAME. Subclasses do not inherit
    it. None: open_clip has no such model."""

    def __post_init__(self) -> None:
        start, end = self.patch_dropout, self.patch_dropout_end
        self.image.kind.check_squares((("model.patch_dropout", start), ("model.patch_dropout_end", end)))
        require_effect(
            self.patch_dropout_schedule is Course.constant or start != end,
            f"model.patch_dropout_schedule={self.patch_dropout_schedule}",
            f"with model.patch_dropout={start} and model.patch_dropout_end={end}",
            "give two different values",
        )
        final = self.final_phase
        require(
            final is None or final.value > 0,
            f"model.patch_dropout_final={self.patch_dropout_final} must be above 0: set it to none for no such phase",
        )

    @property
    def drops_patches(self) -> bool:
        """True if training drops patches at any time."""
        return (self.patch_dropout, self.patch_dropout_end) != (0, 0)

    @property
    def tower_weights(self) -> dict[str, str]:
        """Locations of the initial weights of one tower each, by the name of the tower."""
        towers = {"image": self.image.weights, "text": self.text.weights}
        return {name: location for name, location in towers.items() if location is not None}

    @property
    def lock_options(self) -> str:
        """The options that freeze weights, as text for the log."""
        towers = (("image", self.image), ("text", self.text))
        locks = [f"{name}.lock={tower.lock}" for name, tower in towers if tower.lock != "none"]
        return ", ".join(
            [*locks, *(f"{name}.lora.rank={tower.lora.rank}" for name, tower in towers if tower.lora.rank)]
        )

    @property
    def has_adapters(self) -> bool:
        """True if a tower has low-rank adapters."""
        return bool(self.image.lora.rank or self.text.lora.rank)

    @property
    def final_phase(self) -> Duration | None:
        """The parsed `patch_dropout_final`, None for none."""
        text = self.patch_dropout_final
        return None if text == "none" else Duration.parse(text, "model.patch_dropout_final (or none)", share=True)

    def check_fits(self, whole: Duration, length: Length) -> None:
        """Raises ConfigError if the final phase is as long as `whole`, the run's duration, or longer.

        At composition, `length` has no epoch yet: a phase in another unit than the run's then passes.
        """
        final = self.final_phase
        share = None if final is None else final.share(whole, length)
        require(
            share is None or share < 1,
            f"model.patch_dropout_final={self.patch_dropout_final} is not shorter than duration={whole.text}: shorten "
            "it, or train with model.patch_dropout=0",
        )

    def patch_dropout_over(self, length: Length) -> Callable[[int], float]:
        """Returns a function: samples seen before a step -> share of each image's patches that the step drops."""
        final = 0 if self.final_phase is None else self.final_phase.samples(length)
        start, end, span = self.patch_dropout, self.patch_dropout_end, length.total - final
        course = _COURSES[self.patch_dropout_schedule]
        return lambda seen: 0.0 if final and seen >= span else start + (end - start) * course(seen / span)

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        """Builds the model with initial weights on `device`. `varying`: what training changes."""
        raise NotImplementedError


# Functions from the share of elapsed time to progress in [0, 1].
_COURSES: dict[Course, Callable[[float], float]] = {
    Course.constant: lambda t: 0.0,
    Course.linear: lambda t: min(1.0, t),
    Course.cosine: lambda t: 0.5 - 0.5 * math.cos(math.pi * min(1.0, t)),
}


@register("model")
@frozen
class ClipSpec(ModelSpec):
    """CLIP: an image tower and a text tower with one embedding space (arXiv:2103.00020)."""

    kind: str = "clip"
    """Kind of model: CLIP."""

    embed_dim: int = option(512, ge=1)
    """Dimension of the image and text embeddings."""

    quick_gelu: bool = False
    """Replaces GELU by QuickGELU, x·sigmoid(1.702x), in the text tower and in ViT image towers. OpenAI's weights were
    trained with it. It must match the weights that model.weights loads. Requires text.gelu=exact."""

    open_clip_layout: ClassVar[str | None] = "clipx.weights.open_clip:CLIP"

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        self.text.check_model(self.embed_dim, self.quick_gelu)

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        """Builds the model with initial weights on `device`, which may be "meta".

        Raises ConfigError for an unknown tower, and for a tower that does not support `varying`.
        """
        from clipx.model.clip import CLIP

        return CLIP(self, device=device, dtype=dtype, varying=varying)
