"""CoCa: CLIP with a caption decoder (arXiv:2205.01917), in the form of open_clip's coca_ViT-*.

Attention pools the tokens of an image: the first query gives the embedding, the decoder reads the others. The text
tower appends a class token, which gives the text embedding; the decoder reads its other tokens.

Shape suffixes: B batch, C colour channels (3), S side of the image in pixels, L length of a text, T tokens of all
texts, N tokens of an image, W width, D embedding; W = D.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn

from clipx.errors import require
from clipx.extra.coca.decoder import AttentionPool, CaptionDecoder, Captions
from clipx.extra.coca.spec import CoCaSpec
from clipx.model.clip import CLIP, unit
from clipx.model.packing import Packing, TextPacker, end_positions
from clipx.model.spec import Varying
from clipx.model.text import TextTower
from clipx.model.text_spec import ClipTextSpec
from clipx.model.vision import ImageTower


class CoCa(CLIP):
    """Images and texts -> unit embeddings, and the loss of the text as caption of the image."""

    image: PooledImageTower
    text: ClassTextTower

    def build_towers(self, spec: CoCaSpec, varying: Varying) -> None:
        self.image = PooledImageTower(spec, varying)
        assert isinstance(spec.text, ClipTextSpec)  # checked by the spec
        self.text = ClassTextTower(spec.text, spec.embed_dim, spec.quick_gelu)
        self.decoder = CaptionDecoder(spec.decoder, spec.text.width, spec.quick_gelu)

    def forward(  # type: ignore[override]  # packed captions
        self, image_BCSS: Tensor, tokens_BL: Tensor | PackedCaptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (image_BD, text_BD, caption_B2).

        caption_B2: -log p of the caption given the image, summed over its tokens, and their number. The tokens are all
        after the start, the end token included.
        """
        if isinstance(tokens_BL, Tensor):
            self._check_tokens(tokens_BL)
            tokens_BL = self.packer(tokens_BL)
        image_BD, image_BNW = self.image(self._input(image_BCSS))
        text_BD, x_TW = self.text(tokens_BL.packing)
        captions = tokens_BL.captions.to(x_TW.device)
        loss_B = self.decoder(x_TW, image_BNW, captions)
        return unit(image_BD), unit(text_BD), torch.stack([loss_B, captions.count_B.to(loss_B)], 1)

    def encode_image(self, image: Any) -> Tensor:
        return unit(self.image(self._input(image))[0])

    def encode_text(self, tokens_BL: Tensor | PackedCaptions) -> Tensor:  # type: ignore[override]  # packed captions
        if isinstance(tokens_BL, PackedCaptions):
            return unit(self.text(tokens_BL.packing)[0])
        self._check_tokens(tokens_BL)
        return unit(self.text(tokens_BL)[0])

    @property
    def packer(self) -> CaptionPacker:
        return CaptionPacker(self.text.packed)

    def image_tokens(self, image_BCSS: Tensor) -> Tensor:
        """Returns the image tokens that the decoder reads, [B, N, W]. Takes images as encode_image does."""
        image_BNW: Tensor = self.image(self._input(image_BCSS))[1]
        return image_BNW

    def class_tokens(self) -> set[str]:
        return CLIP.class_tokens(self) | {"text.class_token"}


@dataclass(frozen=True, slots=True)
class PackedCaptions:
    """Texts as input of the text tower, and as captions for the decoder."""

    packing: Packing
    captions: Captions


class CaptionPacker(TextPacker):
    """Packs texts for CoCa, with a position for the class token."""

    def __call__(self, tokens_BL: Tensor) -> PackedCaptions:
        packing = with_class_position(tokens_BL, self.packed)
        return PackedCaptions(packing, Captions.pack(tokens_BL, packing))


class PooledImageTower(ImageTower):
    """Normalized images [B, 3, S, S] -> features [B, D] of any norm, and tokens [B, N, D] for the decoder.

    The trunk is a ViT from timm. Its last norm normalizes the keys and values of the pool.
    """

    reads_all_tokens = True

    def __init__(self, spec: CoCaSpec, varying: Varying) -> None:
        super().__init__(spec.image, spec.embed_dim, spec.quick_gelu, varying)
        trunk = self.trunk
        require(
            isinstance(trunk, VisionTransformer) and trunk.global_pool == "token" and trunk.attn_pool is None,
            f"model.image.timm={spec.image.timm} cannot be combined with model.kind=coca, which pools the tokens of a "
            "ViT itself: choose a ViT that timm pools at its class token, such as vit_base_patch32_clip_224",
        )
        self.pool = AttentionPool(spec.embed_dim, spec.pool_heads, trunk.embed_dim, spec.queries)
        self.norm = nn.LayerNorm(spec.embed_dim)
        self.projection = nn.Linear(spec.embed_dim, spec.embed_dim, bias=False)
        nn.init.normal_(self.projection.weight, std=trunk.embed_dim**-0.5)

    def forward(self, image_BCSS: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # tokens as well
        pooled_BQD = self.norm(self.pool(self.trunk.forward_features(image_BCSS)))
        return self.projection(pooled_BQD[:, 0]), pooled_BQD[:, 1:]

    def class_tokens(self) -> set[str]:
        return ImageTower.class_tokens(self) | {"pool.query"}


class ClassTextTower(TextTower):
    """Token ids [B, L] -> features [B, D] of each text's class token, and tokens [T, W] for the decoder.

    The class token follows the text and its padding and has a separate positional embedding. It attends to the text and
    to the first padding token, and to itself only in a text without padding: this is the effect of open_clip's mask,
    with which open_clip's weights were trained. That mask also hides the tokens after an id 0 inside a text ("!" before
    another mark in one word, as in "!~"). Here, id 0 is a token like any other.
    """

    positional_embedding: nn.Parameter

    def __init__(self, spec: ClipTextSpec, embed_dim: int, quick_gelu: bool) -> None:
        super().__init__(spec, embed_dim, quick_gelu)
        self.class_token = nn.Parameter(torch.empty(spec.width))
        self.positional_embedding = nn.Parameter(torch.empty(spec.context_length + 1, spec.width))
        for embedding in (self.class_token, self.positional_embedding):
            nn.init.normal_(embedding, std=0.01)

    def forward(self, tokens_BL: Tensor | Packing) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # tokens as well
        packing = tokens_BL if isinstance(tokens_BL, Packing) else with_class_position(tokens_BL, self.packed)
        packing = packing.to(self.positional_embedding.device)
        x_TW = self.token_embedding(packing.tokens_T)
        class_BW = self.class_token.to(x_TW.dtype).expand(len(packing.end_B), -1)
        x_TW = x_TW.index_copy(0, packing.end_B, class_BW)
        x_TW = x_TW + F.embedding(packing.position_T, self.positional_embedding)
        for block in self.blocks:
            x_TW = block(x_TW, packing)
        return self.projection(self.norm(x_TW[packing.end_B])), x_TW


def with_class_position(tokens_BL: Tensor, packed: bool) -> Packing:
    """Packs each text, its first padding token if any, and a position for the class token as its end.

    See ClassTextTower. Runs on the device of the tokens. Without `packed`, and on the meta device, all padding remains.
    """
    texts, length = tokens_BL.shape
    used_B = end_positions(tokens_BL) + 1
    packed = packed and not tokens_BL.is_meta
    class_B = (used_B + 1).clamp(max=length) if packed else torch.full_like(used_B, length)
    longest = int(class_B.max()) + 1 if packed else length + 1
    at_L = torch.arange(longest, device=tokens_BL.device)
    position_BL = torch.where(at_L == class_B[:, None], length, at_L)
    tokens_BL = F.pad(tokens_BL, (0, 1))[:, :longest]
    mask_BLL = (at_L <= at_L[:, None]) & (at_L <= used_B[:, None, None])
    everywhere = Packing(
        tokens_BL.flatten(),
        position_BL.flatten(),
        torch.arange(texts * longest, device=tokens_BL.device),
        (class_B + 1).cumsum(0) - 1,
        (texts, longest),
        mask_BLL[:, None],
    )
    if not packed:
        return everywhere
    flat_index_T = (at_L <= class_B[:, None]).flatten().nonzero().squeeze(1)
    return replace(
        everywhere,
        tokens_T=everywhere.tokens_T[flat_index_T],
        position_T=everywhere.position_T[flat_index_T],
        flat_index_T=flat_index_T,
    )
