"""Options of the text tower: the group model/text."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING

from clipx.config.registry import MISSING, declare, frozen, register
from clipx.errors import require
from clipx.model.lora_spec import LoraSpec
from clipx.model.tower_spec import check_checkpointing, check_freezing, check_layers, check_tower_weights
from clipx.storage.url import check_url

if TYPE_CHECKING:
    from torch import nn

    from clipx.model.tokenizer import TextEnd, Tokenizer

declare("text", "clipx.model.hf_text_spec", "hf")


class TextProjection(StrEnum):
    """Projection of the pooled features of a text to the embedding."""

    linear = "linear"
    """A linear layer."""

    mlp = "mlp"
    """Two linear layers without biases, with a GELU between them: the first to the mean of both widths."""

    none = "none"
    """No projection: the features are the embedding."""


class Pool(StrEnum):
    """Pooling of the features of a text's tokens."""

    end = "end"
    """Those of the end token of the text."""

    last = "last"
    """Those of the last position of the context, padding or not."""

    cls = "cls"
    """Those of the first token."""

    mean = "mean"
    """Their mean, without padding."""

    max = "max"
    """Their maximum in each dimension, without padding."""

    map = "map"
    """Attention of a learned query to them, without padding, then an MLP (arXiv:2205.01580)."""


class Positions(StrEnum):
    """Representation of the positions of tokens."""

    learned = "learned"
    """A learned embedding of each position is added to the tokens."""

    rotary = "rotary"
    """Rotations of queries and keys (RoPE, arXiv:2104.09864)."""


class Norm(StrEnum):
    """Normalization of the token features."""

    layer = "layer"
    """LayerNorm."""

    rms = "rms"
    """RMSNorm (arXiv:1910.07467)."""


class Mlp(StrEnum):
    """MLP of a block."""

    gelu = "gelu"
    """Two linear layers with a GELU between them."""

    swiglu = "swiglu"
    """A gated MLP with SiLU (arXiv:2002.05202)."""


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
    """Does the same as clip, and removes ASCII punctuation. Used by SigLIP."""

    whitespace = "whitespace"
    """Collapses white space to single spaces."""


CLIP_VOCABULARY, CLIP_END_ID = 49_408, 49_407


@frozen
class TextTowerSpec:
    """Options of every kind of text tower."""

    kind: str = MISSING
    """Kind of text tower: `clip` (clipx's own transformer) or `hf` (a model of transformers)."""

    weights: str | None = None
    """Initial weights of the text tower alone in a new run: a folder or hf-hub:ORG/NAME of a model of transformers
    (kind=hf), or the text tower of a CLIP model: a run, a file (.safetensors, .pt, .pth, .bin), a folder, or a URL of
    any of these. null: random initialization. Excludes model.weights. See docs/guides/towers.md."""

    context_length: int = 77
    """Number of tokens per text, start and end tokens included, at least 3. Longer texts are truncated."""

    pool: Pool = Pool.end
    """Pooling of the tokens' features: end (the end token), last (the last position of the context, padding or not;
    requires packed=false), cls (the first token; requires causal=false), or mean, max or map (attention of a learned
    query) over the tokens of the text."""

    projection: TextProjection = TextProjection.linear
    """Projection of the pooled features to the embedding: linear, mlp (two linear layers, the first to the mean of both
    widths) or none (the width of the features must be model.embed_dim)."""

    clean: Clean = Clean.clip
    """Cleaning of a text before tokenization: clip (lower case, single spaces), canonical (the same without ASCII
    punctuation, as SigLIP) or whitespace (single spaces). All repair broken Unicode and decode HTML escapes. Must be
    clip with tokenizer=clip."""

    end_id: int | None = None
    """Id of the token with which the tokenizer ends a text: 2 for XLM-V, 1 for mT5. kind=clip: required with another
    tokenizer than clip, except with pool=last; else it must be null. kind=hf: null ends a text at its padding."""

    strip_separator: bool = False
    """Replaces the separator token that the tokenizer appends to a text by padding of id 0, as CLIPA does with BERT's
    (arXiv:2305.07017). Requires a tokenizer with a sep_token in its tokenizer_config.json."""

    packed: bool = True
    """Skips the padding after each text, which then has no effect. false: it is computed, and with causal=false the
    tokens of clipx's own tower attend to it. Must be false with pool=last of that tower, which reads it."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N of at least 1: every
    Nth block; selective: in every block all but matrix products and attention; tower: the whole tower at once. A number
    costs up to a third more computation, tower a third."""

    lock: str = "none"
    """Parameters to freeze. none; all; norms: the normalization layers only; a number N of at least 0: all below the N
    highest blocks, so that these, the last norm and the projection are trained. Requires model.weights or
    model.text.weights. A tower without trained weights stays in evaluation mode."""

    lock_norms: bool = True
    """Freezes the normalization layers in the locked part too. false: they are trained; only valid with lock=all or a
    number."""

    lora: LoraSpec = field(default_factory=LoraSpec)
    """Low-rank adapters of the tower's blocks, trained in place of its weights (LoRA, DoRA). Off by default."""

    @property
    def frozen(self) -> bool:
        """True if no parameter of the tower is trained."""
        return self.lock == "all" and self.lock_norms

    def __post_init__(self) -> None:
        check_checkpointing("text", self.checkpointing)
        check_freezing("text", self.lock, self.lock_norms, self.checkpointing)
        self.lora.check("text", self.lock)
        check_tower_weights("text", self.weights)
        require(
            self.context_length >= 3,
            f"model.text.context_length={self.context_length} must be at least 3: start token, one token, end token",
        )

    @property
    def kept_positions(self) -> int | None:
        """Number of text positions of initial weights that stay where they are when the others are stretched to a
        longer context. None: positions are not stretched."""
        return None

    @property
    def end(self) -> TextEnd:
        """Rule for the last token of a text."""
        raise NotImplementedError

    @property
    def tokenizer_place(self) -> str:
        """Location of the tokenizer, or clip."""
        raise NotImplementedError

    def check_model(self, embed_dim: int, quick_gelu: bool) -> None:
        """Raises ConfigError for a tower that does not fit these options of the model."""

    def build_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ConfigError for an invalid file, or more tokens than the vocabulary."""
        raise NotImplementedError

    def build(self, embed_dim: int, quick_gelu: bool) -> nn.Module:
        """Builds the tower with initial weights on the current default device."""
        raise NotImplementedError


@register("text")
@frozen
class ClipTextSpec(TextTowerSpec):
    """clipx's own transformer. The defaults are CLIP's: causal, pooled at the end token (arXiv:2103.00020)."""

    kind: str = "clip"
    """Kind of text tower: clipx's own transformer."""

    width: int = 512
    """Dimension of the token features, at least 1 and a multiple of `heads`."""

    heads: int = 8
    """Attention heads of each block. At least 1; must divide `width`."""

    layers: int = 12
    """Number of transformer blocks, in [1, 1000]."""

    mlp_ratio: float = 4.0
    """Hidden width of each block's MLP as a multiple of `width`, above 0."""

    causal: bool = True
    """Causal attention: a token attends to itself and to earlier tokens. false: it attends to all tokens of the text,
    and with packed=false to the padding too, as in SigLIP."""

    projection_bias: bool = False
    """Adds a bias to the linear projection to the embedding, as SigLIP does. Requires projection=linear."""

    positions: Positions = Positions.learned
    """Positions of the tokens: learned (an embedding of each position) or rotary (rotations of queries and keys,
    arXiv:2104.09864; the width of a head must be even)."""

    stretch_keep: int | None = None
    """Stretches the text positions of model.weights to a larger context_length (Long-CLIP, arXiv:2403.15378): so many
    first positions are kept, the others are interpolated linearly. At least 0, at most 2 less than the weights have;
    the reference is 20, for 77 to 248 positions. Requires positions=learned. null: the weights must have context_length
    positions."""

    rotary_base: float = 10000.0
    """Base of the wavelengths of rotary positions, above 1. Must be 10000 with positions=learned."""

    norm: Norm = Norm.layer
    """Normalization: layer (LayerNorm) or rms (RMSNorm, arXiv:1910.07467)."""

    norm_eps: float = 1e-5
    """Epsilon of the norms, above 0."""

    mlp: Mlp = Mlp.gelu
    """MLP of the blocks: gelu (two linear layers), or swiglu (gated, arXiv:2002.05202, with three matrices: with an
    mlp_ratio of 8/3 it has as many parameters as with gelu and 4)."""

    gelu: Gelu = Gelu.exact
    """GELU of the MLPs: exact, or tanh (its approximation by a hyperbolic tangent). Must be exact with
    model.quick_gelu=true, which replaces it, and with mlp=swiglu."""

    bias: bool = True
    """Biases of the blocks' linear layers and LayerNorms. The projection has its own option."""

    tokenizer: str = "clip"
    """Tokenizer: clip (CLIP's byte-pair encoding), the path of a Hugging Face tokenizer.json or of its folder, or
    hf-hub:ORG/NAME of a repository that has one."""

    vocabulary: int = CLIP_VOCABULARY
    """Number of rows of the token embedding, at least 2 and at least the number of tokens of the tokenizer. Must
    be 49408 with tokenizer=clip."""

    def __post_init__(self) -> None:
        TextTowerSpec.__post_init__(self)
        for name, value in (("width", self.width), ("heads", self.heads), ("layers", self.layers)):
            require(value >= 1, f"model.text.{name}={value} must be at least 1")
        check_layers("model.text.layers", self.layers)
        require(self.mlp_ratio > 0, f"model.text.mlp_ratio={self.mlp_ratio} must be above 0: 4 is usual")
        require(
            self.width % self.heads == 0,
            f"model.text.width={self.width} is not divisible by model.text.heads={self.heads}: "
            f"set width={self.width // self.heads * self.heads or self.heads}",
        )
        learned = self.positions is Positions.learned
        require(
            learned or self.width // self.heads % 2 == 0,
            f"model.text.positions=rotary needs an even width of a head, not {self.width // self.heads}, which is "
            f"model.text.width={self.width} / model.text.heads={self.heads}: change one of them",
        )
        require(
            self.rotary_base > 1 and (not learned or self.rotary_base == 10_000),
            f"model.text.rotary_base={self.rotary_base:g} must be above 1, and 10000 with model.text.positions="
            f"learned, on which it has no effect",
        )
        require(
            self.stretch_keep is None or learned,
            f"model.text.stretch_keep={self.stretch_keep} has no effect with model.text.positions={self.positions}, "
            "which has no weights: remove it",
        )
        require(
            self.stretch_keep is None or 0 <= self.stretch_keep < self.context_length,
            f"model.text.stretch_keep={self.stretch_keep} must be in [0, model.text.context_length="
            f"{self.context_length}): the reference is 20",
        )
        require(
            self.mlp is Mlp.gelu or self.gelu is Gelu.exact,
            f"model.text.gelu={self.gelu} has no effect with model.text.mlp={self.mlp}: remove one of them",
        )
        require(self.norm_eps > 0, f"model.text.norm_eps={self.norm_eps} must be above 0: 1e-5 is usual")
        require(
            not self.packed or self.pool is not Pool.last,
            "model.text.packed=true skips the padding, which model.text.pool=last reads: give model.text.packed=false",
        )
        require(
            self.pool is not Pool.cls or not self.causal,
            "model.text.pool=cls reads the first token, which with model.text.causal=true attends to itself only: give "
            "model.text.causal=false, or another pool",
        )
        require(
            not self.projection_bias or self.projection is TextProjection.linear,
            f"model.text.projection_bias=true has no effect with model.text.projection={self.projection}: remove it",
        )
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        check_url("model.text.tokenizer", self.tokenizer)
        clip = self.tokenizer == "clip"
        require(
            not clip or (self.vocabulary, self.clean) == (CLIP_VOCABULARY, Clean.clip),
            f"model.text.tokenizer=clip needs vocabulary={CLIP_VOCABULARY} and clean=clip, not model.text.vocabulary="
            f"{self.vocabulary} and model.text.clean={self.clean}: give another tokenizer, or remove these",
        )
        reads_end = not clip and self.pool is not Pool.last
        require(
            not reads_end or self.end_id is not None,
            f"model.text.pool={self.pool} with model.text.tokenizer={self.tokenizer} needs the id of its end token: "
            "give model.text.end_id, or model.text.pool=last",
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
        if self.tokenizer == "clip":
            from clipx.model.tokenizer import Tokenizer

            return Tokenizer(self.context_length)
        from clipx.model.hf_tokenizer import FileTokenizer

        return FileTokenizer(
            self.tokenizer, self.context_length, self.vocabulary, self.clean, self.end_id, self.strip_separator
        )

    @property
    def tokenizer_place(self) -> str:
        return self.tokenizer

    @property
    def kept_positions(self) -> int | None:
        return self.stretch_keep

    @property
    def end(self) -> TextEnd:
        from clipx.model.tokenizer import TextEnd

        if self.pool is Pool.last:
            return TextEnd()
        return TextEnd(CLIP_END_ID if self.end_id is None else self.end_id)

    def check_model(self, embed_dim: int, quick_gelu: bool) -> None:
        require(
            self.projection is not TextProjection.none or self.width == embed_dim,
            f"model.text.projection=none needs model.embed_dim={self.width}, model.text.width, not {embed_dim}: set "
            "it, or remove model.text.projection",
        )
        require(
            not quick_gelu or self.gelu is Gelu.exact,
            f"model.text.gelu={self.gelu} has no effect with model.quick_gelu=true: remove one of them",
        )

    def build(self, embed_dim: int, quick_gelu: bool) -> nn.Module:
        from clipx.model.text import TextTower

        return TextTower(self, embed_dim, quick_gelu)
