"""Options of the image tower, the text tower and the caption decoder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from clipx.config import limits
from clipx.config.messages import missing_value
from clipx.errors import require
from clipx.storage.url import check_url

if TYPE_CHECKING:
    from clipx.model.tokenizer import Tokenizer


# Options that make timm.create_model read files, pickled ones included.
_FILES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


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


class TextProjection(StrEnum):
    """Projection of the pooled features of a text to the embedding."""

    linear = "linear"
    """A linear layer."""

    none = "none"
    """No projection: the features are the embedding."""


class Pool(StrEnum):
    """Position of the token whose features give the text embedding."""

    end = "end"
    """The end token of the text."""

    last = "last"
    """The last position of the context, padding or not."""


class Gelu(StrEnum):
    """Form of the GELU activation."""

    exact = "exact"
    """GELU with the error function."""

    tanh = "tanh"
    """Approximation of GELU by a hyperbolic tangent."""


class Clean(StrEnum):
    """Cleaning of a text before tokenization. Every choice repairs broken Unicode and decodes HTML escapes."""

    clip = "clip"
    """Converts to lower case and collapses white space to single spaces."""

    canonical = "canonical"
    """As clip, and removes ASCII punctuation. Used by SigLIP."""

    whitespace = "whitespace"
    """Collapses white space to single spaces."""


CLIP_VOCABULARY = 49_408


@dataclass(kw_only=True, slots=True)
class ImageTowerSpec:
    """Image tower: any architecture of timm, or stored features, and its projection to the embedding."""

    timm: str | None = None
    """Name of a timm architecture, from timm.list_models(). Required without features, excludes features."""

    features: int | None = None
    """Number of stored features of each sample, which the tower reads in place of an image, in [1, 65536]. It then has
    a projection only, linear or none, and no other option of the image tower may be set. null: the tower reads
    images."""

    size: int = 224
    """Side of the square input images in pixels, in [8, 8192]. A ViT needs a multiple of its patch size."""

    stretch: bool = False
    """Evaluation resizes both sides of an image to `size` and changes its aspect ratio. false: it resizes the shorter
    side to `size` and crops the center."""

    projection: Projection = Projection.linear
    """Projection of the trunk's features to the embedding: linear (a linear layer without bias), mlp (two linear
    layers, the first to twice embed_dim), head (timm's classifier with embed_dim classes) or none (embed_dim must be
    the width of the trunk's features). Must be linear for CLIP's ResNets, whose attention pool projects."""

    patch_bias: bool = True
    """Bias of the patch embedding of a ViT, which timm's ViTs have unless a norm precedes their blocks. false: no bias,
    as in CLIPA (arXiv:2305.07017); only valid for a ViT that has one in timm."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of timm.create_model, as model.image.options.drop_path_rate=0.1 or
    'model.image.options={embed_dim: 128, depth: 4, num_heads: 4}', which sets these and keeps others. At most 1000
    blocks. Options that read files are not allowed: pretrained, checkpoint_path, pretrained_cfg,
    pretrained_cfg_overlay, cache_dir."""

    mean: list[float] = field(default_factory=lambda: [0.48145466, 0.4578275, 0.40821073])
    """Mean of the R, G and B channels, for pixel values in [0, 1]. It is subtracted from the image. The default is
    CLIP's."""

    std: list[float] = field(default_factory=lambda: [0.26862954, 0.26130258, 0.27577711])
    """Standard deviation of the R, G and B channels, for pixel values in [0, 1]; each above 0. The image is divided by
    it after the mean is subtracted. The default is CLIP's."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N of at least 1: every
    Nth block; selective: in every block all but matrix products, convolutions and attention; tower: the whole tower at
    once. A number costs up to a third more computation, tower a third."""

    lock: str = "none"
    """Parameters to freeze (arXiv:2111.07991). none; all; norms: the normalization layers only; a number N of at least
    0: all below the N highest blocks, so that these and the projection are trained. Requires model.weights."""

    lock_norms: bool = True
    """Freezes the normalization layers in the locked part too: weights, biases and running averages, which BatchNorm
    then uses in training. false: they are trained; only valid with lock=all or a number."""

    @property
    def frozen(self) -> bool:
        """True if no parameter of the tower is trained."""
        return (self.lock == "all" and self.lock_norms) or not self.has_weights

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
        self._check_input()
        _check_checkpointing("image", self.checkpointing)
        _check_freezing("image", self.lock, self.lock_norms, self.checkpointing)
        require(self.size >= 8, f"model.image.size={self.size} is too small: give at least 8 pixels")
        limits.check_limit("model.image.size", self.size, limits.PIXELS, "pixels")
        limits.check_tower_options("model.image.options", self.options)
        for name, values in (("mean", self.mean), ("std", self.std)):
            require(len(values) == 3, f"model.image.{name}={values} must have 3 values: one each for R, G and B")
        require(
            not _FILES & self.options.keys(),
            f"model.image.options={self.options} has one of {', '.join(sorted(_FILES))}, with which timm reads files: "
            "remove it, and load weights with model.weights",
        )
        require(min(self.std) > 0, f"model.image.std={self.std} must be above 0 in each channel")

    def _check_input(self) -> None:
        """Checks that the tower reads images or stored features, not both. Raises ConfigError."""
        if self.features is None:
            require(self.timm is not None, missing_value("model.image.timm"))
            return
        key = f"model.image.features={self.features}"
        require(self.features >= 1, f"{key} must be at least 1")
        limits.check_limit("model.image.features", self.features, limits.WIDTH)
        require(
            self.projection is not Projection.head,
            f"model.image.projection=head is timm's classifier, which {key} does not have: choose linear or none",
        )
        for f in fields(self):
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            value = getattr(self, f.name)
            require(
                f.name in ("features", "projection") or value == default,
                f"model.image.{f.name}={value} has no effect with {key}, which replaces the image: remove one of them",
            )


@dataclass(kw_only=True, slots=True)
class TextTowerSpec:
    """Text tower: a transformer over tokens. The defaults are CLIP's: causal, pooled at the end token
    (arXiv:2103.00020)."""

    context_length: int = 77
    """Number of tokens per text, start and end tokens included, in [3, 65536]. Longer texts are truncated."""

    width: int = 512
    """Dimension of the token features, in [1, 65536] and a multiple of `heads`."""

    heads: int = 8
    """Attention heads of each block. At least 1; must divide `width`."""

    layers: int = 12
    """Number of transformer blocks, in [1, 1000]."""

    mlp_ratio: float = 4.0
    """Hidden width of each block's MLP as a multiple of `width`, above 0 and at most 256."""

    causal: bool = True
    """Causal attention: a token attends to itself and to earlier tokens. false: it attends to all positions, padding
    included; this requires packed=false."""

    pool: Pool = Pool.end
    """Position whose features give the text embedding: end (the end token) or last (the last position of the context,
    padding or not; requires packed=false)."""

    projection: TextProjection = TextProjection.linear
    """Projection of the pooled features to the embedding: linear, or none (`width` must be model.embed_dim)."""

    projection_bias: bool = False
    """Adds a bias to the linear projection to the embedding, as SigLIP does. Requires projection=linear."""

    norm_eps: float = 1e-5
    """Epsilon of the LayerNorms, above 0 and at most 1."""

    gelu: Gelu = Gelu.exact
    """GELU of the MLPs: exact, or tanh (its approximation by a hyperbolic tangent). Must be exact with
    model.quick_gelu=true, which replaces it."""

    vocabulary: int = CLIP_VOCABULARY
    """Number of rows of the token embedding, in [2, 16777216] and at least the number of tokens of the tokenizer. Must
    be 49408 with tokenizer=clip."""

    tokenizer: str = "clip"
    """Tokenizer: clip (CLIP's byte-pair encoding), the path of a Hugging Face tokenizer.json or of its folder, or
    hf-hub:ORG/NAME of a repository that has one."""

    clean: Clean = Clean.clip
    """Cleaning of a text before tokenization: clip (lower case, single spaces), canonical (the same without ASCII
    punctuation, as SigLIP) or whitespace (single spaces). All repair broken Unicode and decode HTML escapes. Must be
    clip with tokenizer=clip."""

    end_id: int | None = None
    """Id of the tokenizer's end token, which pool=end reads, in [0, `vocabulary`): 2 for XLM-V, 1 for mT5. Required
    with pool=end and another tokenizer than clip, else null."""

    strip_separator: bool = False
    """Replaces the separator token that the tokenizer appends to a text by padding of id 0, as CLIPA does with BERT's
    (arXiv:2305.07017). Requires a tokenizer with a sep_token in its tokenizer_config.json."""

    packed: bool = True
    """Skips the padding after each text's end token, which has no effect on the embedding. Must be false with
    causal=false or pool=last, where it has one."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N of at least 1: every
    Nth block; selective: in every block all but matrix products and attention; tower: the whole tower at once. A number
    costs up to a third more computation, tower a third."""

    lock: str = "none"
    """Parameters to freeze. none; all; norms: the normalization layers only; a number N of at least 0: all below the N
    highest blocks, so that these, the last norm and the projection are trained. Requires model.weights."""

    lock_norms: bool = True
    """Freezes the normalization layers in the locked part too. false: they are trained; only valid with lock=all or a
    number."""

    @property
    def frozen(self) -> bool:
        """True if no parameter of the tower is trained."""
        return self.lock == "all" and self.lock_norms

    def __post_init__(self) -> None:
        _check_checkpointing("text", self.checkpointing)
        _check_freezing("text", self.lock, self.lock_norms, self.checkpointing)
        require(
            self.context_length >= 3,
            f"model.text.context_length={self.context_length} must be at least 3: start token, one token, end token",
        )
        for name, value in (("width", self.width), ("heads", self.heads), ("layers", self.layers)):
            require(value >= 1, f"model.text.{name}={value} must be at least 1")
        require(self.mlp_ratio > 0, f"model.text.mlp_ratio={self.mlp_ratio} must be above 0: 4 is usual")
        self._check_limits()
        require(
            self.width % self.heads == 0,
            f"model.text.width={self.width} is not divisible by model.text.heads={self.heads}: "
            f"set width={self.width // self.heads * self.heads or self.heads}",
        )
        require(self.norm_eps > 0, f"model.text.norm_eps={self.norm_eps} must be above 0: 1e-5 is usual")
        require(
            not self.packed or (self.causal and self.pool is Pool.end),
            f"model.text.packed=true skips the padding, which has an effect with model.text.causal="
            f"{str(self.causal).lower()} and model.text.pool={self.pool}: give model.text.packed=false",
        )
        require(
            not self.projection_bias or self.projection is TextProjection.linear,
            f"model.text.projection_bias=true has no effect with model.text.projection={self.projection}: remove it",
        )
        self._check_tokenizer()

    def _check_limits(self) -> None:
        for name, value, limit, unit in (
            ("context_length", self.context_length, limits.TOKENS, "tokens"),
            ("width", self.width, limits.WIDTH, ""),
            ("layers", self.layers, limits.LAYERS, ""),
            ("mlp_ratio", self.mlp_ratio, limits.MLP_RATIO, ""),
            ("norm_eps", self.norm_eps, 1.0, ""),
            ("vocabulary", self.vocabulary, limits.VOCABULARY, "tokens"),
        ):
            limits.check_limit(f"model.text.{name}", value, limit, unit)
        limits.check_parameters(
            "model.text.width", self.layers, self.width, self.mlp_ratio, further=self.vocabulary * self.width
        )

    def _check_tokenizer(self) -> None:
        check_url("model.text.tokenizer", self.tokenizer)
        clip = self.tokenizer == "clip"
        require(
            not clip or (self.vocabulary, self.clean) == (CLIP_VOCABULARY, Clean.clip),
            f"model.text.tokenizer=clip needs vocabulary={CLIP_VOCABULARY} and clean=clip, not model.text.vocabulary="
            f"{self.vocabulary} and model.text.clean={self.clean}: give another tokenizer, or remove these",
        )
        reads_end = not clip and self.pool is Pool.end
        require(
            not reads_end or self.end_id is not None,
            f"model.text.pool=end with model.text.tokenizer={self.tokenizer} needs the id of its end token: give "
            "model.text.end_id, or model.text.pool=last",
        )
        require(
            reads_end or self.end_id is None,
            f"model.text.end_id={self.end_id} has no effect with model.text.tokenizer={self.tokenizer} and "
            f"model.text.pool={self.pool}: remove it",
        )
        require(
            self.end_id is None or 0 <= self.end_id < self.vocabulary,
            f"model.text.end_id={self.end_id} must be in [0, model.text.vocabulary={self.vocabulary})",
        )
        require(
            not (clip and self.strip_separator),
            "model.text.strip_separator=true has no effect with model.text.tokenizer=clip, which has no separator: "
            "remove it",
        )
        require(self.vocabulary >= 2, f"model.text.vocabulary={self.vocabulary} must be at least 2")

    def build_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ConfigError for an invalid file, or more tokens than the vocabulary."""
        if self.tokenizer == "clip":
            from clipx.model.tokenizer import Tokenizer

            return Tokenizer(self.context_length)
        from clipx.model.hf_tokenizer import FileTokenizer

        return FileTokenizer(
            self.tokenizer, self.context_length, self.vocabulary, self.clean, self.end_id, self.strip_separator
        )


@dataclass(kw_only=True, slots=True)
class DecoderSpec:
    """Caption decoder: a causal transformer over the text tower's tokens, with cross-attention to the image tokens. Its
    width is that of the text tower."""

    heads: int = 8
    """Attention heads of each block. At least 1; must divide the width of the text tower."""

    layers: int = 12
    """Number of layers, each a self-attention block and a cross-attention block, in [1, 1000]."""

    mlp_ratio: float = 4.0
    """Hidden width of each block's MLP as a multiple of the width, above 0 and at most 256."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N of at least 1: every
    Nth layer; selective: in every layer all but matrix products and attention; tower: the whole decoder at once. A
    number costs up to a third more computation, tower a third."""

    def __post_init__(self) -> None:
        _check_checkpointing("decoder", self.checkpointing)
        for name, value in (("heads", self.heads), ("layers", self.layers)):
            require(value >= 1, f"model.decoder.{name}={value} must be at least 1")
        limits.check_limit("model.decoder.layers", self.layers, limits.LAYERS)
        limits.check_limit("model.decoder.mlp_ratio", self.mlp_ratio, limits.MLP_RATIO)
        require(self.mlp_ratio > 0, f"model.decoder.mlp_ratio={self.mlp_ratio} must be above 0: 4 is usual")


def _check_checkpointing(tower: str, value: str) -> None:
    require(
        value in ("none", "selective", "tower") or (value.isdecimal() and int(value) >= 1),
        f"model.{tower}.checkpointing={value} is not a choice: give none, selective, tower, or a number of at least 1, "
        "such as 2 for every second block",
    )


def _check_freezing(tower: str, lock: str, norms: bool, checkpointing: str) -> None:
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
