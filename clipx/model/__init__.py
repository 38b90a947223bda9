"""Models: two towers that return unit embeddings. Spec here; towers in `vision`, `text`, put together in `clip`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clipx.config import MISSING, option
from clipx.errors import require

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP


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

    def __post_init__(self) -> None:
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

    def __post_init__(self) -> None:
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


@dataclass(kw_only=True, slots=True)
class ModelSpec:
    kind: str = MISSING
    name: str = MISSING  # shown in run names and reports
    image: ImageTowerSpec = MISSING
    text: TextTowerSpec = MISSING

    def build(self, device: torch.device, dtype: torch.dtype) -> CLIP:
        raise NotImplementedError


@option("model")
@dataclass(kw_only=True, slots=True)
class ClipSpec(ModelSpec):
    """Two towers into one embedding space (CLIP, arXiv:2103.00020)."""

    kind: str = "clip"
    embed_dim: int = 512
    quick_gelu: bool = False  # x·sigmoid(1.702x), as in OpenAI's weights; must match the weights one loads

    def __post_init__(self) -> None:
        require(self.embed_dim >= 1, f"model.embed_dim={self.embed_dim} must be at least 1")

    def build(self, device: torch.device, dtype: torch.dtype) -> CLIP:
        """The model with initial weights, on `device` ("meta" included). Raises ConfigError for an unknown tower."""
        from clipx.model.clip import CLIP

        return CLIP(self, device=device, dtype=dtype)
