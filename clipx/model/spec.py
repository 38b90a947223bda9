"""Models: two towers that return unit embeddings. Spec here; towers in `vision`, `text`, put together in `clip`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from clipx.config.duration import Duration, Length
from clipx.config.registry import MISSING, option
from clipx.errors import require
from clipx.storage.url import check_url

if TYPE_CHECKING:
    import torch

    from clipx.model.clip import CLIP
    from clipx.model.coca import CoCa
    from clipx.model.tokenizer import Tokenizer


# What makes timm.create_model open files, pickled ones too.
_FILES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


class Projection(StrEnum):
    """From what timm's trunk gives for an image to the embedding; a trunk whose attention pool has one keeps that."""

    linear = "linear"  # without bias
    head = "head"  # the trunk's own classifier, with as many classes as the embedding has numbers
    none = "none"  # what the trunk gives is the embedding


class Pool(StrEnum):
    """Where a text is read."""

    end = "end"  # at its end token
    last = "last"  # at the last place of the context, whatever stands there


class Gelu(StrEnum):
    exact = "exact"
    tanh = "tanh"  # its approximation by a hyperbolic tangent


class Clean(StrEnum):
    """What is done to a text before it is cut into tokens; all repair broken Unicode and undo HTML escapes."""

    clip = "clip"  # lower case, one space for each run of white space
    canonical = "canonical"  # the same without ASCII punctuation: SigLIP's
    whitespace = "whitespace"  # one space for each run of white space


CLIP_VOCABULARY = 49_408


@dataclass(kw_only=True, slots=True)
class ImageTowerSpec:
    """An image tower from timm, by any name timm knows, and its projection to the embedding."""

    timm: str = MISSING  # a name from timm.list_models()
    size: int = 224  # pixels, square
    squash: bool = False  # evaluation resizes both sides to size; false: the shorter side, and cuts out the centre
    projection: Projection = Projection.linear
    options: dict[str, Any] = field(default_factory=dict)  # passed on to timm.create_model
    mean: list[float] = field(default_factory=lambda: [0.48145466, 0.4578275, 0.40821073])  # of RGB in [0, 1]
    std: list[float] = field(default_factory=lambda: [0.26862954, 0.26130258, 0.27577711])
    checkpointing: str = "none"  # what the backward pass computes again, to save memory: 1 every block, 2 every second
    # one, and so on; selective: of every block all but its matrix products; tower: the tower at once
    lock: str = "none"  # what does not learn (arXiv:2111.07991): all; norms, these alone; or a number of the highest
    # blocks that still do, as the projection then does, while what lies below them does not
    lock_norms: bool = True  # of what is locked the norms too: weights, biases, and averages, which BatchNorm then uses

    @property
    def whole(self) -> bool:
        """Whether none of it learns."""
        return self.lock == "all" and self.lock_norms

    def __post_init__(self) -> None:
        _check_checkpointing("image", self.checkpointing)
        _check_lock("image", self.lock, self.lock_norms, self.checkpointing)
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
    """A transformer over tokens; as it stands CLIP's, causal and read at the end token (arXiv:2103.00020)."""

    context_length: int = 77  # tokens, start and end included
    width: int = 512
    heads: int = 8
    layers: int = 12
    mlp_ratio: float = 4.0
    causal: bool = True  # a token sees itself and what stands before it; false: all of its text, padding too
    pool: Pool = Pool.end
    projection_bias: bool = False
    norm_eps: float = 1e-5
    gelu: Gelu = Gelu.exact
    vocabulary: int = CLIP_VOCABULARY  # tokens that there are
    tokenizer: str = "clip"  # its byte pairs; or a Hugging Face tokenizer.json: a path, or hf-hub:ORG/NAME that has it
    clean: Clean = Clean.clip
    packed: bool = True  # computes nothing after a text's end token, where it would have no effect on the embedding
    checkpointing: str = "none"  # as the image tower's
    lock: str = "none"  # as the image tower's
    lock_norms: bool = True

    @property
    def whole(self) -> bool:
        """Whether none of it learns."""
        return self.lock == "all" and self.lock_norms

    def __post_init__(self) -> None:
        _check_checkpointing("text", self.checkpointing)
        _check_lock("text", self.lock, self.lock_norms, self.checkpointing)
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
        require(self.norm_eps > 0, f"model.text.norm_eps={self.norm_eps} must be above 0: 1e-5 is usual")
        require(
            not self.packed or (self.causal and self.pool is Pool.end),
            f"model.text.packed=true leaves out what follows a text's end, which has an effect with model.text.causal="
            f"{str(self.causal).lower()} and model.text.pool={self.pool}: give model.text.packed=false",
        )
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        check_url("model.text.tokenizer", self.tokenizer)
        clip = self.tokenizer == "clip"
        require(
            not clip or (self.vocabulary, self.clean) == (CLIP_VOCABULARY, Clean.clip),
            f"model.text.tokenizer=clip has {CLIP_VOCABULARY} tokens and a way to clean, not model.text.vocabulary="
            f"{self.vocabulary} and model.text.clean={self.clean}: give another tokenizer, or leave these out",
        )
        require(
            clip or self.pool is not Pool.end,
            f"model.text.pool=end looks for the end token of model.text.tokenizer=clip, not of {self.tokenizer}: give "
            "model.text.pool=last",
        )
        require(self.vocabulary >= 2, f"model.text.vocabulary={self.vocabulary} must be at least 2")

    def build_tokenizer(self) -> Tokenizer:
        """Raises ConfigError for a file that is no tokenizer's, or one with more tokens than the vocabulary."""
        if self.tokenizer == "clip":
            from clipx.model.tokenizer import Tokenizer

            return Tokenizer(self.context_length)
        from clipx.model.hf_tokenizer import FileTokenizer

        return FileTokenizer(self.tokenizer, self.context_length, self.vocabulary, self.clean)


def _check_checkpointing(tower: str, value: str) -> None:
    require(
        value in ("none", "selective", "tower") or (value.isdecimal() and int(value) >= 1),
        f"model.{tower}.checkpointing={value} is not a choice: give none, selective, tower, or a number from 1, as 2 "
        "for every second block",
    )


def _check_lock(tower: str, lock: str, norms: bool, checkpointing: str) -> None:
    key = f"model.{tower}.lock"
    require(
        lock in ("none", "all", "norms") or lock.isdecimal(),
        f"{key}={lock} is not a choice: give none, norms, all, or how many of the highest blocks still learn, from 0",
    )
    require(norms or lock not in ("none", "norms"), f"{key}_norms=false has no effect on {key}={lock}: leave it out")
    require(
        checkpointing == "none" or not (lock == "all" and norms),
        f"model.{tower}.checkpointing={checkpointing} has no effect on {key}=all, which has no backward pass: leave it "
        "out",
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
    weights: str | None = None  # to begin with: a run, a file or a folder, see docs/weights.md; null: drawn at random
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
    def captions(self) -> bool:
        """Whether it has a decoder, and gives each caption's loss besides the embeddings."""
        return False

    @property
    def drops_patches(self) -> bool:
        return (self.patch_dropout, self.patch_dropout_end) != (0, 0)

    @property
    def locks(self) -> str:
        """For the log."""
        towers = (("image", self.image), ("text", self.text))
        return ", ".join(f"{name}.lock={tower.lock}" for name, tower in towers if tower.lock != "none")

    def check_locks(self, learns_besides: bool, lr_scales: Mapping[str, float]) -> None:
        """Raises ConfigError where weights drawn at random are locked, or nothing is left to learn.

        `learns_besides`: whether the objective has weights of its own that are worth training alone. `lr_scales`: the
        towers' learning rates as multiples of the model's.
        """
        whole = []
        for name, tower in (("image", self.image), ("text", self.text)):
            require(
                tower.lock == "none" or self.weights is not None,
                f"model.{name}.lock={tower.lock} keeps weights that are drawn at random: give model.weights=…, or "
                "leave it out",
            )
            if tower.whole:
                whole.append(name)
                scale = lr_scales[name]
                require(
                    scale == 1,
                    f"optimizer.{name}_lr_scale={scale:g} has no effect on model.{name}.lock=all: leave one out",
                )
        require(
            len(whole) < 2 or learns_besides,
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
        require(
            not self.quick_gelu or self.text.gelu is Gelu.exact,
            f"model.text.gelu={self.text.gelu} has no effect with model.quick_gelu=true: leave one out",
        )

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CLIP:
        """The model with initial weights, on `device` ("meta" included). Raises ConfigError for an unknown tower, and
        for one that does not take what is `varying`."""
        from clipx.model.clip import CLIP

        return CLIP(self, device=device, dtype=dtype, varying=varying)


@dataclass(kw_only=True, slots=True)
class DecoderSpec:
    """A causal transformer that reads the text tower's tokens, as wide as they are, and looks at the image's."""

    heads: int = 8
    layers: int = 12  # each a block of the text and one that looks at the image
    mlp_ratio: float = 4.0
    checkpointing: str = "none"  # as the image tower's

    def __post_init__(self) -> None:
        _check_checkpointing("decoder", self.checkpointing)
        for name, value in (("heads", self.heads), ("layers", self.layers)):
            require(value >= 1, f"model.decoder.{name}={value} must be at least 1")
        require(self.mlp_ratio > 0, f"model.decoder.mlp_ratio={self.mlp_ratio} must be above 0: 4 is usual")


@option("model")
@dataclass(kw_only=True, slots=True)
class CoCaSpec(ClipSpec):
    """Two towers, and a decoder that captions (CoCa, arXiv:2205.01917, in open_clip's form)."""

    kind: str = "coca"
    queries: int = 256  # that pool an image's tokens: the first gives the embedding, the others what the decoder reads
    pool_heads: int = 8
    decoder: DecoderSpec = MISSING

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

    @property
    def captions(self) -> bool:
        return True

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CoCa:
        from clipx.model.coca import CoCa

        return CoCa(self, device=device, dtype=dtype, varying=varying)
