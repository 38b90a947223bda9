"""Options of CoCa: CLIP with a caption decoder."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import default_of, option, typed
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import ConfigError, require
from clipx.model.spec import FIXED, ClipSpec, Varying
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tower_spec import MOST_LAYERS

if TYPE_CHECKING:
    import torch

    from clipx.extra.coca.model import CoCa


CAPTION_LOSSES = "losses of captions"
"""Further output of the model, which objective=coca reads."""


@frozen
class DecoderSpec:
    """Caption decoder: a causal transformer over the text tower's tokens, with cross-attention to the image tokens. Its
    width is that of the text tower."""

    heads: int = option(8, ge=1)
    """Attention heads of each block. Must divide the width of the text tower."""

    layers: int = option(12, ge=1, le=MOST_LAYERS)
    """Number of layers, each a self-attention block and a cross-attention block."""

    mlp_ratio: float = option(4.0, gt=0)
    """Hidden width of each block's MLP as a multiple of the width."""

    checkpointing: str = option("none", choices=("none", "selective", "tower"), ge=1)
    """Activation checkpointing: what the backward pass recomputes to save memory. none; a number N: every Nth layer;
    selective: in every layer all but matrix products and attention; tower: the whole decoder at once. A number costs up
    to a third more computation, tower a third."""


@register("model")
@frozen
class CoCaSpec(ClipSpec):
    """CoCa: CLIP with a decoder that generates captions (arXiv:2205.01917), in open_clip's form.

    The image tower must be a ViT that timm pools at its class token, with image.projection=linear. The text tower must
    be causal, with text.pool=end and text.tokenizer=clip.
    """

    kind: str = "coca"
    """Kind of model: CoCa."""

    queries: int = option(256, ge=2, hint="the decoder reads all but one")
    """Number of learned queries that pool the tokens of an image: the first query gives the embedding, the decoder
    reads the others."""

    pool_heads: int = option(8, ge=1)
    """Attention heads of the pool over image tokens. Must divide embed_dim."""

    decoder: DecoderSpec = MISSING
    """Decoder that predicts the next token of a caption. Its heads must divide embed_dim."""

    outputs: ClassVar[str | None] = CAPTION_LOSSES
    has_pooled_trunk: ClassVar[bool] = False
    open_clip_layout: ClassVar[str | None] = "clipx.extra.coca.weights:LAYOUT"

    def __post_init__(self) -> None:
        ClipSpec.__post_init__(self)
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
                width % heads == 0,
                f"model.{key}={heads} does not divide model.embed_dim={width}: give a divisor, such as 8 for 512",
            )
        self.image.kind.check_squares_for(
            "model.kind=coca, whose decoder reads the same number of tokens of each image", "choose another model"
        )
        fixed = {
            "text": ("causal", "pool", "tokenizer", "positions", "norm", "mlp", "bias", "stretch_keep", "projection"),
            "image": ("head_blocks", "projection"),
        }
        for tower, options in (("text", text), ("image", self.image)):
            for f in fields(options):
                value = getattr(options, f.name)
                require(
                    f.name not in fixed[tower] or value == default_of(f),
                    f"model.{tower}.{f.name}={typed(value)} cannot be combined with model.kind=coca, whose decoder and "
                    "pool of image tokens need those of CLIP's towers: remove it",
                )

    def build(self, device: torch.device, dtype: torch.dtype, varying: Varying = FIXED) -> CoCa:
        from clipx.extra.coca.model import CoCa

        return CoCa(self, device=device, dtype=dtype, varying=varying)
