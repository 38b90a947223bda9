"""Options of both towers, their low-rank adapters, and the image tower."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from operator import attrgetter
from typing import Any, ClassVar

from clipx.config.messages import missing_value
from clipx.config.options import option, typed
from clipx.config.specs import complete, frozen
from clipx.errors import require, require_effect
from clipx.model.image_kind import ImageKind
from clipx.storage.url import check_url

# Options that make timm.create_model read files, pickled ones included.
_FILES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}

# Normalization of the pixels for CLIP, by the keys of model.image.
_NORMALIZATION = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}

MOST_LAYERS = 1000
"""Largest number of layers. A layer is built at a time, without its memory: a file of somebody else that names millions
would take hours."""


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


TIMM = "timm"
"""Value of model.image.weights, or its prefix before a colon and a name: weights that timm names on the hub."""


def timm_weights_of(location: str | None) -> str | None:
    """Returns NAME or NAME.TAG of timm:NAME.TAG, an empty string for timm, and None for other locations."""
    if location == TIMM:
        return ""
    return location.removeprefix(f"{TIMM}:") if location is not None and location.startswith(f"{TIMM}:") else None


def _check_weights(key: str, location: str) -> None:
    """Raises ConfigError for an invalid value of model.image.weights or model.text.weights."""
    check_url(key, location)
    require(bool(location), f"{key}= is empty: give a location of weights, or remove it")
    name = timm_weights_of(location)
    require(
        name is None or key == "model.image.weights",
        f"{key}={location} names weights of timm, which has no text towers: give a folder or hf-hub:ORG/NAME",
    )
    require(
        name != "" or location == TIMM,
        f"{key}={location} names no model: give timm:NAME.TAG, or timm for that of model.image.timm",
    )


def _check_options(key: str, options: dict[str, Any]) -> None:
    """Raises ConfigError for arguments of timm.create_model that read files, or build more than MOST_LAYERS layers, in
    one number or in a list of stages."""
    require(
        not _FILES & options.keys(),
        f"{key}={options} has one of {', '.join(sorted(_FILES))}, with which timm reads files: remove it, and load "
        "weights with model.image.weights or model.weights",
    )
    for name, value in options.items():
        numbers = [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, int | float)]
        require(
            not ("depth" in name or "layers" in name) or sum(numbers) <= MOST_LAYERS,
            f"{key}.{name}={value} is above the limit of {MOST_LAYERS:,} layers: give less",
        )


def check_width(tower: str, embed_dim: int, width: int, what: str) -> None:
    """Raises ConfigError for a tower without projection whose features, of a `width` that is `what`, are no
    embeddings."""
    require(
        width == embed_dim,
        f"model.{tower}.projection=none needs model.embed_dim={width}, {what}, not {embed_dim}: set it, or remove "
        f"model.{tower}.projection",
    )


def _check_layers(key: str, layers: list[str]) -> None:
    require(bool(layers), f"{key}=[] selects no layer: give patterns of names, or remove it")


@frozen
class LoraSpec:
    """Low-rank adapters of the linear layers in a tower's blocks (LoRA, arXiv:2106.09685). Off by default.

    The weights of the tower are frozen, except for those of the adapters and of the projection to the embedding.
    """

    rank: int = option(0, ge=0, hint="8 is usual, 0 disables adapters")
    """Rank of the adapters: a layer of I inputs and O outputs gets rank · (I + O) trained weights. At most the smaller
    of both; 4 to 64 is usual. Requires initial weights. 0: no adapters."""

    alpha: float | None = option(None, gt=0, when="rank", hint="rank or 2 · rank is usual")
    """Scale of the adapters: their product is multiplied by alpha / rank. null: rank, a factor of 1."""

    dropout: float = option(0.0, ge=0, lt=1, when="rank", hint="0.1 is usual")
    """Dropout of the inputs of the adapters during training. The frozen layers have none, but for the part that DoRA's
    magnitude adds to them."""

    layers: list[str] = option(["*"], when="rank", check=_check_layers)
    """Linear layers with adapters: patterns of their names within a block, such as attn.qkv, attn.* or mlp.fc?. Each
    pattern must match a layer. [*]: all linear layers of the blocks, those of attention and of the MLP."""

    last: int | None = option(None, ge=1, when="rank")
    """Number of the highest blocks with adapters. null: all blocks."""

    dora: bool = option(False, when="rank")
    """Also trains the norm of each row of the adapted weights (DoRA, arXiv:2402.09353): often better at a low rank, for
    a slower step."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices of an adapter."""
        return 1.0 if self.alpha is None or not self.rank else self.alpha / self.rank


@frozen
class TowerSpec:
    """Options of both towers: initial weights, and what of them is trained."""

    weights: str | None = option(None, when="not model.weights", check=_check_weights)
    """Initial weights of this tower alone in a new run. The tower of a CLIP model: a run, a file (.safetensors, .pt,
    .pth, .bin), a folder, hf-hub:ORG/NAME, or a URL of any of these. model.image: also timm (those of model.image.timm
    on the Hugging Face hub), timm:NAME.TAG, or a timm model in a file, folder or repository. model.text with kind=hf:
    also a model of transformers in a folder or repository. null: random initialization. See docs/guides/towers.md."""

    checkpointing: str = option(
        "none", choices=("none", "selective", "tower"), ge=1, when="lock != all or not lock_norms"
    )
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N: every Nth block;
    selective: in every block all but matrix products, convolutions and attention; tower: the whole tower at once. A
    number costs up to a third more computation, tower a third."""

    lock: str = option("none", choices=("none", "all", "norms"), ge=0, when="not lora.rank")
    """Parameters to freeze (arXiv:2111.07991). none; all; norms: the normalization layers only; a number N: all below
    the N highest blocks, so that these, the last norm of a text tower, head_blocks and the projection are trained.
    Requires initial weights. A tower or image trunk without trained weights stays in evaluation mode."""

    lock_norms: bool = option(True, when="lock != none, norms")
    """Freezes the normalization layers in the locked part too: weights, biases and running averages, which BatchNorm
    then uses in training. false: they are trained."""

    lora: LoraSpec = field(default_factory=LoraSpec)
    """Low-rank adapters of the tower's blocks, trained in place of its weights (LoRA, DoRA). Off by default."""

    @property
    def has_weights(self) -> bool:
        """False for stored features without a projection."""
        return True

    @property
    def frozen(self) -> bool:
        """True if no parameter of the tower is trained."""
        return (self.lock == "all" and self.lock_norms) or not self.has_weights


@frozen
class ImageTowerSpec(TowerSpec):
    """Image tower: any architecture of timm, or stored features, and its projection to the embedding."""

    timm: str | None = option(None, when="not features")
    """Name of a timm architecture, from timm.list_models(). Required without features."""

    features: int | None = option(None, ge=1, when="projection != head")
    """Number of stored features of each sample, which the tower reads in place of an image. It then has a projection
    only, linear or none, and no other option of the image tower may be set. null: the tower reads images."""

    size: int = option(224, ge=8, unit="pixels", when="not features")
    """Side of the square input images. A ViT needs a multiple of its patch size."""

    stretch: bool = option(False, when="not features")
    """Evaluation resizes both sides of an image to `size` and changes its aspect ratio. false: it resizes the shorter
    side to `size` and crops the center."""

    interpolation: Interpolation = option(Interpolation.bicubic, when="not features")
    """Filter that resizes images in training and evaluation: bicubic or bilinear, both with antialiasing. Weights of
    CLIPA, MobileCLIP and others were trained with bilinear."""

    projection: Projection = Projection.linear
    """Projection of the trunk's features to the embedding: linear (a linear layer without bias), mlp (two linear
    layers, the first to twice embed_dim), head (timm's classifier with embed_dim classes) or none (embed_dim must be
    the width of the trunk's features). Must be linear for CLIP's ResNets, whose attention pool projects."""

    head_blocks: int = option(0, ge=0, le=MOST_LAYERS, when="not features and projection != head")
    """Number of transformer blocks between the trunk and the projection. They are trained above a locked trunk, as in
    dino.txt (arXiv:2412.16334), and have its form. The projection then reads the class token and the mean of the patch
    tokens, concatenated. Requires a ViT with a class token, pooled at it. 0: none."""

    head_weights: str | None = option(None, when="head_blocks and weights", check=check_url)
    """Initial weights of the head_blocks in a new run: a file of a vision head of dino.txt, or its URL (.safetensors,
    .pt, .pth, .bin). null: those of model.image.weights if it has such blocks, else random initialization."""

    head_drop_path: float = option(0.0, ge=0, lt=1, when="head_blocks", hint="0.3 is that of dino.txt")
    """Rate of stochastic depth (arXiv:1603.09382) of the head_blocks in training. dino.txt: 0.3."""

    patch_bias: bool = option(True, when="not features")
    """Bias of the patch embedding of a ViT, which timm's ViTs have unless a norm precedes their blocks. false: no bias,
    as in CLIPA (arXiv:2305.07017); only valid for a ViT that has one in timm."""

    options: dict[str, Any] = option({}, when="not features", check=_check_options)
    """Further keyword arguments of timm.create_model, as model.image.options.drop_path_rate=0.1 or
    'model.image.options={embed_dim: 128, depth: 4, num_heads: 4}', which sets these and keeps others. At most 1000
    blocks. Options that read files are not allowed: pretrained, checkpoint_path, pretrained_cfg,
    pretrained_cfg_overlay, cache_dir."""

    mean: list[float] | None = option(None, length=3)
    """Mean of the R, G and B channels, for pixel values in [0, 1]. It is subtracted from the image. null: that of
    model.image.weights, if they are given and have one; else CLIP's."""

    std: list[float] | None = option(None, length=3, gt=0)
    """Standard deviation of the R, G and B channels, for pixel values in [0, 1]. The image is divided by it after the
    mean is subtracted. null: as for mean."""

    adapts: ClassVar[tuple[str, ...]] = ("size",)
    """Options in which weights may differ, because their positional embeddings are interpolated."""

    @property
    def kind(self) -> ImageKind:
        """Kind of input: what is read of a sample as its image. A plug-in's subclass returns its own."""
        if self.features is not None:
            return ImageKind(
                tower="clipx.model.features:FeatureTower",
                reader="clipx.data.images:FeatureReader",
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
        if self.features is None:
            require(self.timm is not None, missing_value("model.image.timm"))
            self._check_timm_weights()
            return
        without = {"weights": None, "checkpointing": "none", "lock": "none", "lora.rank": 0, **_NORMALIZATION}
        for key, usual in without.items():
            value = attrgetter(key)(self)
            replaced = f"with model.image.features={self.features}, which replaces the image"
            require_effect(value == usual, f"model.image.{key}={typed(value)}", replaced)

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
