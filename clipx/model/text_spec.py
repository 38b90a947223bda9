"""Options of the text tower: the group model/text."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option, typed
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import require, require_effect
from clipx.model.tower_spec import MOST_LAYERS, TowerSpec, check_width
from clipx.storage.url import check_url

if TYPE_CHECKING:
    from torch import nn

    from clipx.model.tokenizer import TextEnd, Tokenizer


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
class TextTowerSpec(TowerSpec):
    """Options of every kind of text tower."""

    kind: str = MISSING
    """Kind of text tower: `clip` (clipx's own transformer) or `hf` (a model of transformers)."""

    context_length: int = option(77, ge=3, hint="a start token, one token and an end token")
    """Number of tokens per text, start and end tokens included. Longer texts are truncated."""

    pool: Pool = Pool.end
    """Pooling of the tokens' features: end (the last token of the text), last (the last position of the context,
    padding or not; for kind=clip with packed=false), cls (the first token; not for causal models), or mean, max or map
    (attention of a learned query) over the tokens of the text."""

    projection: TextProjection = TextProjection.linear
    """Projection of the pooled features to the embedding: linear, mlp (two linear layers, the first to the mean of both
    widths) or none (the width of the features must be model.embed_dim)."""

    tokenizer: str | None = option("clip", check=check_url)
    """Tokenizer: the path of a Hugging Face tokenizer.json or of its folder, or hf-hub:ORG/NAME of a repository that
    has one. kind=clip: also clip (CLIP's byte-pair encoding). kind=hf: null for that of `source`."""

    clean: Clean = option(Clean.clip, when="tokenizer != clip")
    """Cleaning of a text before tokenization: clip (lower case, single spaces), canonical (the same without ASCII
    punctuation, as SigLIP) or whitespace (single spaces). All repair broken Unicode and decode HTML escapes."""

    end_id: int | None = option(None, ge=0)
    """Id of the token with which the tokenizer ends a text: 2 for XLM-V, 1 for mT5. kind=clip: required with another
    tokenizer than clip, except with pool=last; else it must be null. kind=hf: null ends a text at its padding."""

    strip_separator: bool = option(False, when="tokenizer != clip")
    """Replaces the separator token that the tokenizer appends to a text by padding of id 0, as CLIPA does with BERT's
    (arXiv:2305.07017). Requires a tokenizer with a sep_token in its tokenizer_config.json."""

    packed: bool = True
    """Skips the padding after each text, which then has no effect. false: it is computed, and with causal=false the
    tokens of clipx's own tower attend to it. Must be false with pool=last of that tower, which reads it."""

    open_clip_layout: ClassVar[str | None] = None
    """Conversion to and from open_clip, a `clipx.weights.clip_layout.TextLayout`, as MODULE:NAME. None: open_clip has
    no such tower."""

    own_weights: ClassVar[str | None] = None
    """Function that loads weights in the form of another library, as MODULE:NAME: called with these options and
    model.text.weights, returns (tensors by their names in the tower, lines for the log), or None for the weights of a
    CLIP model. None: there is no other form."""

    pads_last: ClassVar[bool] = False
    """True if padding follows a text, whatever the files of the tokenizer say."""

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

    width: int = option(512, ge=1)
    """Dimension of the token features, a multiple of `heads`."""

    heads: int = option(8, ge=1)
    """Attention heads of each block. Must divide `width`."""

    layers: int = option(12, ge=1, le=MOST_LAYERS)
    """Number of transformer blocks."""

    mlp_ratio: float = option(4.0, gt=0)
    """Hidden width of each block's MLP as a multiple of `width`."""

    causal: bool = True
    """Causal attention: a token attends to itself and to earlier tokens. false: it attends to all tokens of the text,
    and with packed=false to the padding too, as in SigLIP."""

    projection_bias: bool = option(False, when="projection == linear")
    """Adds a bias to the linear projection to the embedding, as SigLIP does."""

    positions: Positions = Positions.learned
    """Positions of the tokens: learned (an embedding of each position) or rotary (rotations of queries and keys,
    arXiv:2104.09864; the width of a head must be even)."""

    stretch_keep: int | None = option(None, ge=0, when="positions == learned", hint="the reference is 20")
    """Stretches the text positions of model.weights to a larger context_length (Long-CLIP, arXiv:2403.15378): so many
    first positions are kept, the others are interpolated linearly. At most 2 less than the weights have; the reference
    is 20, for 77 to 248 positions. null: the weights must have context_length positions."""

    rotary_base: float = option(10000.0, gt=1, when="positions == rotary")
    """Base of the wavelengths of rotary positions."""

    norm: Norm = Norm.layer
    """Normalization: layer (LayerNorm) or rms (RMSNorm, arXiv:1910.07467)."""

    norm_eps: float = option(1e-5, gt=0)
    """Epsilon of the norms."""

    mlp: Mlp = Mlp.gelu
    """MLP of the blocks: gelu (two linear layers), or swiglu (gated, arXiv:2002.05202, with three matrices: with an
    mlp_ratio of 8/3 it has as many parameters as with gelu and 4)."""

    gelu: Gelu = option(Gelu.exact, when="mlp == gelu")
    """GELU of the MLPs: exact, or tanh (its approximation by a hyperbolic tangent). Must be exact with
    model.quick_gelu=true, which replaces it."""

    bias: bool = True
    """Biases of the blocks' linear layers and LayerNorms. The projection has its own option."""

    vocabulary: int = option(CLIP_VOCABULARY, ge=2, when="tokenizer != clip")
    """Number of rows of the token embedding, at least the number of tokens of the tokenizer."""

    open_clip_layout: ClassVar[str | None] = "clipx.weights.clip_config:TEXT"

    def __post_init__(self) -> None:
        require(
            self.width % self.heads == 0,
            f"model.text.width={self.width} is not divisible by model.text.heads={self.heads}: "
            f"set width={self.width // self.heads * self.heads or self.heads}",
        )
        require(
            self.positions is Positions.learned or self.width // self.heads % 2 == 0,
            f"model.text.positions=rotary needs an even width of a head, not {self.width // self.heads}, which is "
            f"model.text.width={self.width} / model.text.heads={self.heads}: change one of them",
        )
        require(
            self.stretch_keep is None or self.stretch_keep < self.context_length,
            f"model.text.stretch_keep={self.stretch_keep} must be below model.text.context_length="
            f"{self.context_length}: the reference is 20",
        )
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
            self.tokenizer is not None, "model.text.tokenizer=null is only for model/text=hf: give clip, or a place"
        )
        given = f"model.text.tokenizer={self.tokenizer} and model.text.pool={self.pool}"
        if self.tokenizer == "clip" or self.pool is Pool.last:
            require_effect(self.end_id is None, f"model.text.end_id={self.end_id}", f"with {given}")
        else:
            require(
                self.end_id is not None and self.end_id < self.vocabulary,
                f"model.text.end_id={typed(self.end_id)} must be the end token of the tokenizer, below "
                f"model.text.vocabulary={self.vocabulary}, with {given}: give it, or model.text.pool=last",
            )

    def build_tokenizer(self) -> Tokenizer:
        if self.tokenizer == "clip":
            from clipx.model.tokenizer import Tokenizer

            return Tokenizer(self.context_length)
        from clipx.model.hf_tokenizer import FileTokenizer

        return FileTokenizer(
            self.tokenizer_place, self.context_length, self.vocabulary, self.clean, self.end_id, self.strip_separator
        )

    @property
    def tokenizer_place(self) -> str:
        assert self.tokenizer is not None
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
        if self.projection is TextProjection.none:
            check_width("text", embed_dim, self.width, "model.text.width")
        given = f"model.text.gelu={self.gelu}"
        require_effect(
            not quick_gelu or self.gelu is Gelu.exact, given, "with model.quick_gelu=true", "remove one of them"
        )

    def build(self, embed_dim: int, quick_gelu: bool) -> nn.Module:
        from clipx.model.text import TextTower

        return TextTower(self, embed_dim, quick_gelu)
