"""Options of CLIP on images at their own aspect ratio."""

from __future__ import annotations

import re
from dataclasses import field
from typing import ClassVar

from clipx.config.options import option, typed
from clipx.config.registry import frozen, register
from clipx.errors import ConfigError, require, require_effect
from clipx.model.image_kind import ImageKind
from clipx.model.spec import ClipSpec
from clipx.model.tower_spec import ImageTowerSpec
from clipx.weights.formats import WeightsFormat, register_format


@frozen
class NaflexTowerSpec(ImageTowerSpec):
    """Image tower that keeps the aspect ratio of images: timm's NaFlexVit (arXiv:2502.14786).

    The patches of a micro-batch are computed as one sequence without padding. `size`, `stretch`, `patch_bias`,
    `head_blocks` and `features` have no effect and must not be set.
    """

    max_tokens: int = option(256, ge=1, le=65_535)  # patches stores it in two bytes
    """Largest number of patches of an image. Images are enlarged or reduced to nearly this number."""

    adapts: ClassVar[tuple[str, ...]] = ("size", "max_tokens")

    @property
    def kind(self) -> ImageKind:
        return ImageKind(
            tower="clipx.extra.naflex.tower:NativeImageTower",
            reader="clipx.extra.naflex.reader:NativeReader",
            option=f"model.image.max_tokens={self.max_tokens}",
            reason="whose images keep their aspect ratio",
            data_options=("crop_scale", "max_pixels", "min_side"),
            most_tokens=self.max_tokens,
            summary=f"at their own aspect ratio, at most {self.max_tokens:,} patches of {self.patch} pixels",
        )

    @property
    def patch(self) -> int:
        """Side of a patch in pixels: options.patch_size, or that in timm's name."""
        named = re.search(r"_patch(\d+)", self.architecture)
        found = self.options.get("patch_size", named and int(named[1]))
        if not (isinstance(found, int) and 2 <= found <= 256):
            raise ConfigError(
                f"model.image.options.patch_size={found} must be a number in [2, 256] of a tower that keeps the aspect "
                "ratio of images: give one, such as 16"
            )
        return found

    def __post_init__(self) -> None:
        ImageTowerSpec.__post_init__(self)
        unused = {"features": None, "size": 224, "stretch": False, "patch_bias": True, "head_blocks": 0}
        for key, usual in unused.items():
            value = getattr(self, key)
            given, fix = f"model.image.{key}={typed(value)}", "remove it, or choose another model"
            require_effect(value == usual, given, "on images at their own aspect ratio", fix)
        require(
            self.architecture.startswith("naflexvit_"),
            f"model.image.timm={self.timm} is no tower for images of any aspect ratio: choose "
            "naflexvit_base_patch16_siglip, or another naflexvit_…",
        )
        assert self.patch  # checks it


@register("model")
@frozen
class NaflexSpec(ClipSpec):
    """CLIP on images at their own aspect ratio."""

    kind: str = "naflex"
    """Kind of model: CLIP on images at their own aspect ratio."""

    image: NaflexTowerSpec = field(default_factory=lambda: NaflexTowerSpec(timm="naflexvit_base_patch16_siglip"))
    """Image tower, which keeps the aspect ratio of images, and its projection to the embedding."""


register_format(
    WeightsFormat(
        name="siglip2",
        read="clipx.extra.naflex.weights:read",
        recognizes=lambda config: config.get("model_type") == "siglip2",
    )
)
