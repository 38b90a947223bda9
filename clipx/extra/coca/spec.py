"""Options of CoCa: CLIP with a caption decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import MISSING, frozen, register
from clipx.errors import ConfigError, require
from clipx.model.spec import FIXED, ClipSpec, Varying
from clipx.model.text_spec import ClipTextSpec, Pool, TextProjection
from clipx.model.tower_spec import Projection, check_checkpointing, check_layers

if TYPE_CHECKING:
    import torch

    from clipx.extra.coca.model import CoCa


CAPTION_LOSSES = "losses of captions"
"""Further output of the model, which objective=coca reads."""


@frozen
class DecoderSpec:
    """Caption decoder: a causal transformer over the text tower's tokens, with cross-attention to the image tokens. Its
    width is that of the text tower."""

    heads: int = 8
    """Attention heads of each block. At least 1; must divide the width of the text tower."""

    layers: int = 12
    """Number of layers, each a self-attention block and a cross-attention block, in [1, 1000]."""

    mlp_ratio: float = 4.0
    """Hidden width of each block's MLP as a multiple of the width, above 0."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N of at least 1: every
    Nth layer; selective: in every layer all but matrix products and attention; tower: the whole decoder at once. A
    number costs up to a third more computation, tower a third."""

    def __post_init__(self) -> None:
        check_checkpointing("decoder", self.checkpointing)
        for name, value in (("heads", self.heads), ("layers", self.layers)):
            require(value >= 1, f"model.decoder.{name}={value} must be at least 1")
        check_layers("model.decoder.layers", self.layers)
        require(self.mlp_ratio > 0, f"model.decoder.mlp_ratio={self.mlp_ratio} must be above 0: 4 is usual")


@register("model")
@frozen
class CoCaSpec(ClipSpec):
    """CoCa: CLIP with a decoder that generates captions (arXiv:2205.01917), in open_clip's form.

    The image tower must be a ViT that timm pools at its class token, with image.projection=linear. The text tower must
    be causal, with text.pool=end and text.tokenizer=clip.
    """

    kind: str = "coca"
    """Kind of model: CoCa."""

    queries: int = 256
    """Number of learned queries that pool the tokens of an image, at least 2: the first query gives the embedding,
    the decoder reads the others."""

    pool_heads: int = 8
    """Attention heads of the pool over image tokens. Must divide embed_dim."""

    decoder: DecoderSpec = MISSING
    """Decoder that predicts the next token of a caption. Its heads must divide embed_dim."""

    outputs: ClassVar[str | None] = CAPTION_LOSSES
    has_pooled_trunk: ClassVar[bool] = False
    open_clip_layout: ClassVar[str | None] = "clipx.extra.coca.weights:LAYOUT"

    def __post_init__(self) -> None:
        ClipSpec.__post_init__(self)
        require(self.queries >= 2, f"model.queries={self.queries} must be at least 2: the decoder reads all but one")
        text = self.text
        if not isinstance(text, ClipTextSpec):
            raise ConfigError(
                f"model.text.kind={text.kind} cannot be combined with model.kind=coca, whose decoder reads the tokens "
                "of clipx's own text tower: remove model/text"
            )
        width = text.width
        require(
            self.embed_dim == width,
            f"model.embed_dim={self.embed_dim} differs from model.text.width={width}, and the decoder needs image and "
            "text tokens of the same width: set both to the same value",
        )
        for key, heads in (("pool_heads", self.pool_heads), ("decoder.heads", self.decoder.heads)):
            require(
                heads >= 1 and width % heads == 0,
                f"model.{key}={heads} does not divide model.embed_dim={width}: give a divisor, such as 8 for 512",
            )
        require(
            text.causal and text.pool is Pool.end and text.tokenizer == "clip",
            f"model.kind=coca predicts the next token and needs a causal text tower with CLIP's tokenizer: remove "
            f"model.text.causal={str(text.causal).lower()}, pool={text.pool} and tokenizer={text.tokenizer}",
        )
        usual = ClipTextSpec()
        for key in ("positions", "norm", "mlp", "bias"):
            require(
                getattr(text, key) == getattr(usual, key),
                f"model.text.{key}={getattr(text, key)} cannot be combined with model.kind=coca, whose decoder has the "
                "blocks of CLIP: remove it",
            )
        require(
            text.stretch_keep is None,
            f"model.text.stretch_keep={text.stretch_keep} cannot be combined with model.kind=coca, whose text tower "
            "has a position of its class token: remove it",
        )
        require(
            text.projection is TextProjection.linear,
            f"model.text.projection={text.projection} cannot be combined with model.kind=coca, whose class token "
            "is projected: remove it",
        )
        self.image.kind.check_squares_for(
            "model.kind=coca, whose decoder reads the same number of tokens of each image", "choose another model"
        )
        require(
            not self.image.head_blocks,
            f"model.image.head_blocks={self.image.head_blocks} cannot be combined with model.kind=coca, whose "
            "attention pool reads the tokens of the trunk: remove it",
        )
        require(
            self.image.projection is Projection.linear,
            f"model.image.projection={self.image.projection} cannot be combined with model.kind=coca, whose attention "
            "pool has a projection: remove it",
        )

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CoCa:
        from clipx.extra.coca.model import CoCa

        return CoCa(self, device=device, dtype=dtype, varying=varying)
