"""Options of the image tower."""

from __future__ import annotations

import dataclasses
from dataclasses import field, fields
from enum import StrEnum
from typing import Any, ClassVar

from clipx.config.messages import missing_value
from clipx.config.specs import complete, frozen
from clipx.errors import require
from clipx.model.image_kind import ImageKind
from clipx.model.lora_spec import LoraSpec
from clipx.storage.url import check_url

# Options that make timm.create_model read files, pickled ones included.
_FILES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}

# Normalization of the pixels for CLIP, by the keys of model.image.
_NORMALIZATION = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}

_MOST_LAYERS = 1000


class Projection(StrEnum):
    """Projection of the image features of timm's trunk to the embedding.

    A trunk with an attention pool that projects (CLIP's ResNets) uses that projection and requires `linear`.
    """

    linear = "linear"
    """A linear layer without bias."""

    mlp = "mlp"
    """Two linear layers with a GELU between them: the first to twice embed_dim, with bias, the second without."""

    head = "head"
    """timm's classifier of the trunk, with embed_dim classes."""

    none = "none"
    """No projection: the features of the trunk are the embedding."""


class Interpolation(StrEnum):
    """Filter that resizes images, with antialiasing."""

    bicubic = "bicubic"
    """Cubic convolution over 4x4 pixels."""

    bilinear = "bilinear"
    """A triangle over 2x2 pixels: smoother."""


@frozen
class ImageTowerSpec:
    """Image tower: any architecture of timm, or stored features, and its projection to the embedding."""

    timm: str | None = None
    """Name of a timm architecture, from timm.list_models(). Required without features, excludes features."""

    features: int | None = None
    """Number of stored features of each sample, which the tower reads in place of an image, at least 1. It then has
    a projection only, linear or none, and no other option of the image tower may be set. null: the tower reads
    images."""

    size: int = 224
    """Side of the square input images in pixels, at least 8. A ViT needs a multiple of its patch size."""

    stretch: bool = False
    """Evaluation resizes both sides of an image to `size` and changes its aspect ratio. false: it resizes the shorter
    side to `size` and crops the center."""

    interpolation: Interpolation = Interpolation.bicubic
    """Filter that resizes images in training and evaluation: bicubic or bilinear, both with antialiasing. Weights of
    CLIPA, MobileCLIP and others were trained with bilinear."""

    projection: Projection = Projection.linear
    """Projection of the trunk's features to the embedding: linear (a linear layer without bias), mlp (two linear
    layers, the first to twice embed_dim), head (timm's classifier with embed_dim classes) or none (embed_dim must be
    the width of the trunk's features). Must be linear for CLIP's ResNets, whose attention pool projects."""

    weights: str | None = None
    """Initial weights of the image tower alone in a new run: timm (those of model.image.timm on the Hugging Face hub),
    timm:NAME.TAG, a file of a timm model or of a CLIP model (.safetensors, .pt, .pth, .bin), a folder of either, a run,
    a URL of any of these, or hf-hub:ORG/NAME. null: random initialization. Excludes model.weights. See
    docs/guides/towers.md."""

    head_blocks: int = 0
    """Number of transformer blocks between the trunk and the projection, in [0, 1000]. They are trained above a locked
    trunk, as in dino.txt (arXiv:2412.16334), and have its form. The projection then reads the class token and the mean
    of the patch tokens, concatenated. Requires a ViT with a class token, pooled at it. 0: none."""

    head_weights: str | None = None
    """Initial weights of the head_blocks in a new run: a file of a vision head of dino.txt, or its URL (.safetensors,
    .pt, .pth, .bin). Requires weights of the trunk, model.image.weights. null: those of model.image.weights if it has
    such blocks, else random initialization."""

    head_drop_path: float = 0.0
    """Rate of stochastic depth (arXiv:1603.09382) of the head_blocks in training, in [0, 1). dino.txt: 0.3."""

    patch_bias: bool = True
    """Bias of the patch embedding of a ViT, which timm's ViTs have unless a norm precedes their blocks. false: no bias,
    as in CLIPA (arXiv:2305.07017); only valid for a ViT that has one in timm."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of timm.create_model, as model.image.options.drop_path_rate=0.1 or
    'model.image.options={embed_dim: 128, depth: 4, num_heads: 4}', which sets these and keeps others. At most 1000
    blocks. Options that read files are not allowed: pretrained, checkpoint_path, pretrained_cfg,
    pretrained_cfg_overlay, cache_dir."""

    mean: list[float] | None = None
    """Mean of the R, G and B channels, for pixel values in [0, 1]. It is subtracted from the image. null: that of
    model.image.weights, if they are given and have one; else CLIP's."""

    std: list[float] | None = None
    """Standard deviation of the R, G and B channels, for pixel values in [0, 1]; each above 0. The image is divided by
    it after the mean is subtracted. null: as for mean."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N of at least 1: every
    Nth block; selective: in every block all but matrix products, convolutions and attention; tower: the whole tower at
    once. A number costs up to a third more computation, tower a third."""

    lock: str = "none"
    """Parameters to freeze (arXiv:2111.07991). none; all; norms: the normalization layers only; a number N of at least
    0: all below the N highest blocks, so that these, head_blocks and the projection are trained. Requires model.weights
    or model.image.weights. A trunk without trained weights stays in evaluation mode."""

    lock_norms: bool = True
    """Freezes the normalization layers in the locked part too: weights, biases and running averages, which BatchNorm
    then uses in training. false: they are trained; only valid with lock=all or a number."""

    lora: LoraSpec = field(default_factory=LoraSpec)
    """Low-rank adapters of the tower's blocks, trained in place of its weights (LoRA, DoRA). Off by default."""

    adapts: ClassVar[tuple[str, ...]] = ("size",)
    """Options in which weights may differ, because their positional embeddings are interpolated."""

    @property
    def frozen(self) -> bool:
        """True if no parameter of the tower is trained."""
        return (self.lock == "all" and self.lock_norms) or not self.has_weights

    @property
    def kind(self) -> ImageKind:
        """Kind of input: what is read of a sample as its image. A plug-in's subclass returns its own."""
        if self.features is not None:
            return ImageKind(
                tower="clipx.model.features:FeatureTower",
                reader="clipx.data.features:FeatureReader",
                option=f"model.image.features={self.features}",
                reason="which replaces the image",
                has_trunk=False,
            )
        return ImageKind(
            tower="clipx.model.vision:ImageTower",
            reader="clipx.data.images:PixelReader",
            option=f"model.image.size={self.size}",
            reason="which is a square",
            data_options=("crop_scale", "crop_ratio", "augment", "decode", "max_pixels", "min_side"),
            squares=True,
        )

    @property
    def normalization(self) -> dict[str, list[float]]:
        """Values of mean and std by these keys; CLIP's in place of null."""
        given = {"mean": self.mean, "std": self.std}
        return {key: list(usual) if (value := given[key]) is None else value for key, usual in _NORMALIZATION.items()}

    @property
    def architecture(self) -> str:
        """Name of the timm architecture of a tower that reads images."""
        assert self.timm is not None
        return self.timm

    @property
    def has_weights(self) -> bool:
        """False for stored features without a projection."""
        return self.features is None or self.projection is not Projection.none

    def __post_init__(self) -> None:
        if self.weights is None:
            complete(self, **self.normalization)
        self._check_input()
        check_checkpointing("image", self.checkpointing)
        check_freezing("image", self.lock, self.lock_norms, self.checkpointing)
        self.lora.check("image", self.lock)
        require(self.size >= 8, f"model.image.size={self.size} is too small: give at least 8 pixels")
        for name, value in self.options.items():
            if "depth" in name or "layers" in name:
                check_layers(f"model.image.options.{name}", value)
        for name, values in self.normalization.items():
            require(len(values) == 3, f"model.image.{name}={values} must have 3 values: one each for R, G and B")
        require(
            not _FILES & self.options.keys(),
            f"model.image.options={self.options} has one of {', '.join(sorted(_FILES))}, with which timm reads files: "
            "remove it, and load weights with model.image.weights or model.weights",
        )
        check_tower_weights("image", self.weights)
        self._check_timm_weights()
        self._check_head_blocks()
        require(min(self.normalization["std"]) > 0, f"model.image.std={self.std} must be above 0 in each channel")

    def _check_timm_weights(self) -> None:
        """Checks the rules of weights on timm's hub. Raises ConfigError."""
        name = timm_weights_of(self.weights)
        if name is None:
            return
        base, named = self.architecture.partition(".")[0], name.partition(".")[0]
        require(
            named in ("", base),
            f"model.image.weights={self.weights} are of another architecture than model.image.timm={self.timm}: give "
            f"model.image.timm={named}, or model.image.weights=timm",
        )
        projects = self.projection is not Projection.none
        require(
            not (self.frozen and projects),
            f"model.image.lock=all freezes the randomly initialized projection, which model.image.weights="
            f"{self.weights} does not have: give model.image.lock=0, which trains it, or model.image.projection=none",
        )

    def _check_head_blocks(self) -> None:
        """Checks the options of the blocks above the trunk. Raises ConfigError."""
        require(self.head_blocks >= 0, f"model.image.head_blocks={self.head_blocks} is negative: give 0 for none")
        check_layers("model.image.head_blocks", self.head_blocks)
        require(
            0 <= self.head_drop_path < 1,
            f"model.image.head_drop_path={self.head_drop_path} must be in [0, 1): 0.3 is that of dino.txt",
        )
        require(
            self.head_blocks > 0 or not self.head_drop_path,
            f"model.image.head_drop_path={self.head_drop_path} has no effect without blocks: give "
            "model.image.head_blocks, or remove it",
        )
        if self.head_weights is not None:
            key = f"model.image.head_weights={self.head_weights}"
            check_url("model.image.head_weights", self.head_weights)
            require(self.head_blocks > 0, f"{key} has no effect without blocks: give model.image.head_blocks=2")
            require(
                self.weights is not None,
                f"{key} needs the trunk for which they were trained: give model.image.weights=…, or remove it",
            )
        require(
            not self.head_blocks or self.projection is not Projection.head,
            f"model.image.projection=head is timm's classifier, which does not read the tokens of "
            f"model.image.head_blocks={self.head_blocks}: choose linear or mlp",
        )

    def _check_input(self) -> None:
        """Checks that the tower reads images or stored features, not both. Raises ConfigError."""
        if self.features is None:
            require(self.timm is not None, missing_value("model.image.timm"))
            return
        key = f"model.image.features={self.features}"
        require(self.features >= 1, f"{key} must be at least 1")
        require(
            self.projection is not Projection.head,
            f"model.image.projection=head is timm's classifier, which {key} does not have: choose linear or none",
        )
        require(
            not self.lora.rank,
            f"model.image.lora.rank={self.lora.rank} has no effect with {key}, which has no blocks: remove one of them",
        )
        for f in fields(self):
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            default = _NORMALIZATION.get(f.name, default)
            value = getattr(self, f.name)
            require(
                f.name in ("features", "projection") or value == default,
                f"model.image.{f.name}={value} has no effect with {key}, which replaces the image: remove one of them",
            )


TIMM = "timm"
"""Value of model.image.weights, or its prefix before a colon and a name: weights that timm names on the hub."""


def timm_weights_of(location: str | None) -> str | None:
    """Returns NAME or NAME.TAG of timm:NAME.TAG, an empty string for timm, and None for other locations."""
    if location == TIMM:
        return ""
    return location.removeprefix(f"{TIMM}:") if location is not None and location.startswith(f"{TIMM}:") else None


def check_tower_weights(tower: str, location: str | None) -> None:
    """Raises ConfigError for an invalid value of model.TOWER.weights."""
    if location is None:
        return
    key = f"model.{tower}.weights"
    check_url(key, location)
    require(bool(location), f"{key}= is empty: give a location of weights, or remove it")
    name = timm_weights_of(location)
    require(
        name is None or tower == "image",
        f"{key}={location} names weights of timm, which has no text towers: give a folder or hf-hub:ORG/NAME",
    )
    require(
        name != "" or location == TIMM,
        f"{key}={location} names no model: give timm:NAME.TAG, or timm for that of model.image.timm",
    )


def check_layers(key: str, value: Any) -> None:
    """Raises ConfigError for more than 1,000 layers, in one number or in a list of stages.

    A layer is built at a time, without its memory: a file of somebody else that names millions would take hours.
    """
    numbers = [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, int | float)]
    require(sum(numbers) <= _MOST_LAYERS, f"{key}={value} is above the limit of {_MOST_LAYERS:,} layers: give less")


def check_checkpointing(tower: str, value: str) -> None:
    require(
        value in ("none", "selective", "tower") or (value.isdecimal() and int(value) >= 1),
        f"model.{tower}.checkpointing={value} is not a choice: give none, selective, tower, or a number of at least 1, "
        "such as 2 for every second block",
    )


def check_freezing(tower: str, lock: str, norms: bool, checkpointing: str) -> None:
    key = f"model.{tower}.lock"
    require(
        lock in ("none", "all", "norms") or lock.isdecimal(),
        f"{key}={lock} is not a choice: give none, norms, all, or the number of highest blocks to train, at least 0",
    )
    require(norms or lock not in ("none", "norms"), f"{key}_norms=false has no effect with {key}={lock}: remove it")
    require(
        checkpointing == "none" or not (lock == "all" and norms),
        f"model.{tower}.checkpointing={checkpointing} has no effect with {key}=all, which has no backward pass: remove "
        "it",
    )
