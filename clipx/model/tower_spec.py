"""Options of the towers: image, text, and the decoder that captions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from clipx.config.registry import MISSING
from clipx.errors import require
from clipx.storage.url import check_url

if TYPE_CHECKING:
    from clipx.model.tokenizer import Tokenizer


# Options with which timm.create_model opens files, pickled ones too.
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
    stretch: bool = False  # evaluation resizes both sides to size; false: the shorter side, and cuts out the centre
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
    def frozen(self) -> bool:
        """Whether no parameter of the tower is trained."""
        return self.lock == "all" and self.lock_norms

    def __post_init__(self) -> None:
        _check_checkpointing("image", self.checkpointing)
        _check_freezing("image", self.lock, self.lock_norms, self.checkpointing)
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
    def frozen(self) -> bool:
        """Whether no parameter of the tower is trained."""
        return self.lock == "all" and self.lock_norms

    def __post_init__(self) -> None:
        _check_checkpointing("text", self.checkpointing)
        _check_freezing("text", self.lock, self.lock_norms, self.checkpointing)
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


def _check_checkpointing(tower: str, value: str) -> None:
    require(
        value in ("none", "selective", "tower") or (value.isdecimal() and int(value) >= 1),
        f"model.{tower}.checkpointing={value} is not a choice: give none, selective, tower, or a number from 1, as 2 "
        "for every second block",
    )


def _check_freezing(tower: str, lock: str, norms: bool, checkpointing: str) -> None:
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
