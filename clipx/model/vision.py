"""The image tower: any architecture of timm, and a linear projection to the embedding.

Shape suffixes: B batch, C colour channels (3), S side of the image in pixels, D embedding.
"""

from __future__ import annotations

import difflib
from typing import Any

import timm
import torch
from timm.layers import AttentionPool2d, RotAttentionPool2d
from timm.models import VisionTransformer, get_pretrained_cfg
from torch import Tensor, nn

from clipx.errors import ConfigError, require
from clipx.model import ImageTowerSpec


class ImageTower(nn.Module):
    """Normalised images [B, 3, S, S] -> features [B, D] of any norm.

    Initial weights. The projection is normal with deviation (its inputs)^-.5. The trunk has timm's own, except that a
    ViT in CLIP's form has OpenAI's where the two differ outside the blocks: class token and positional embedding
    normal with deviation width^-.5. (Both leave the patch convolution as PyTorch draws it.)
    """

    def __init__(self, spec: ImageTowerSpec, embed_dim: int, quick_gelu: bool) -> None:
        super().__init__()
        self.trunk = _trunk(spec, quick_gelu)
        self.projection = _projection(self.trunk, embed_dim)
        if _is_clip_vit(self.trunk):
            _init_as_clip(self.trunk)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        features_BD: Tensor = self.projection(self.trunk(image_BCSS))
        return features_BD

    def positional_embeddings(self) -> set[str]:
        """Names of the learned absolute positional embeddings, of the attention pool too: timm's pos_embed*."""
        return {name for name, _ in self.named_parameters() if _leaf(name).startswith("pos_embed")}

    def class_tokens(self) -> set[str]:
        """Names of the learned tokens that join the image's own: class, register, and the query that pools."""
        tokens = ("cls_token", "dist_token", "reg_token", "latent")
        return {name for name, _ in self.named_parameters() if _leaf(name).startswith(tokens)}


def _trunk(spec: ImageTowerSpec, quick_gelu: bool) -> Any:
    """timm's model without a classifier: [B, 3, S, S] -> [B, features]. Raises ConfigError for what timm refuses."""
    options = {**_size_option(spec), **spec.options}
    rehearsed = _rehearse(spec, options)
    if quick_gelu and isinstance(rehearsed, VisionTransformer):  # the GELUs of others are not CLIP's to replace
        options = {"act_layer": "quick_gelu", **options}
    return timm.create_model(spec.timm, pretrained=False, num_classes=0, **options)


def _rehearse(spec: ImageTowerSpec, options: dict[str, Any]) -> Any:
    """The trunk without memory, after one image without memory: what does not fit shows at once, for under 0.5 s."""
    try:
        with torch.device("meta"), torch.no_grad():
            trunk = timm.create_model(spec.timm, pretrained=False, num_classes=0, **options).eval()
            shape = list(trunk(torch.empty(1, 3, spec.size, spec.size)).shape)
            require(shape == [1, trunk.head_hidden_size], f"it gives {shape} for an image instead of one vector")
            return trunk
    except Exception as error:  # anything timm or torch may say about arguments it did not foresee
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"model.image.size={spec.size} and model.image.options={spec.options} do not fit timm's {spec.timm} "
            f"({reason}): give a size and arguments that this architecture takes"
        ) from error


def _size_option(spec: ImageTowerSpec) -> dict[str, int]:
    """img_size for an architecture whose weights depend on it; the others take any size and know no such option."""
    try:
        require(timm.is_model(spec.timm), f"model.image.timm={spec.timm} is not a model of timm{_near(spec.timm)}")
        cfg = get_pretrained_cfg(spec.timm)
    except RuntimeError as error:  # a known architecture, an unknown tag of weights
        raise ConfigError(
            f"model.image.timm={spec.timm} names no weights of timm: use {spec.timm.partition('.')[0]}"
        ) from error
    return {"img_size": spec.size} if cfg is not None and cfg.fixed_input_size else {}


def _near(name: str) -> str:
    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    return f": did you mean {' or '.join(close)}?" if close else ": give a name from timm.list_models()"


def _projection(trunk: Any, embed_dim: int) -> nn.Module:
    """Features -> [B, D]. An attention pool (CLIP's ResNets) has a projection of its own, which then gives D."""
    pool = next((m for m in trunk.children() if isinstance(m, AttentionPool2d | RotAttentionPool2d)), None)
    if pool is not None:
        trunk.reset_classifier(embed_dim)
        nn.init.normal_(pool.proj.weight, std=pool.proj.in_features**-0.5)
        return nn.Identity()
    projection = nn.Linear(trunk.head_hidden_size, embed_dim, bias=False)
    nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
    return projection


def _is_clip_vit(trunk: Any) -> bool:
    """Whether a trunk has CLIP's form: a ViT that is normalised before its blocks and read at its class token."""
    return (
        isinstance(trunk, VisionTransformer)
        and isinstance(trunk.norm_pre, nn.LayerNorm)
        and trunk.global_pool == "token"
        and trunk.pos_embed is not None
    )


def _init_as_clip(trunk: Any) -> None:
    for parameter in (trunk.cls_token, trunk.pos_embed):
        nn.init.normal_(parameter, std=trunk.embed_dim**-0.5)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
