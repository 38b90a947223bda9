"""The image tower: any architecture of timm, and a linear projection to the embedding.

Shape suffixes: B batch, C colour channels (3), S side of the image in pixels, D embedding.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from typing import Any

import timm
import torch
from timm.layers import AttentionPool2d, PatchDropout, PatchDropoutWithIndices, RotAttentionPool2d
from timm.models import VisionTransformer, get_pretrained_cfg
from torch import Tensor, nn

from clipx.errors import ConfigError, require
from clipx.model.activation_checkpointing import checkpoint_tower
from clipx.model.blocks import image_blocks
from clipx.model.spec import FIXED, Varying
from clipx.model.tower_spec import ImageTowerSpec, Projection


class ImageTower(nn.Module):
    """Normalised images [B, 3, S, S] -> features [B, D] of any norm.

    Initial weights. The projection is normal with deviation (its inputs)^-.5. The trunk has timm's own, except that a
    ViT in CLIP's form has OpenAI's where the two differ outside the blocks: class token and positional embedding
    normal with deviation width^-.5. (Both leave the patch convolution as PyTorch draws it.)
    """

    def __init__(self, spec: ImageTowerSpec, embed_dim: int, quick_gelu: bool, varying: Varying = FIXED) -> None:
        super().__init__()
        self.varying = varying
        self.trunk = _trunk(spec, quick_gelu, varying)
        self.set_patch_dropout(0.0)
        self.projection = _projection(self.trunk, embed_dim, spec)
        if is_clip_vit(self.trunk):
            _init_as_clip(self.trunk)
        blocks = list(image_blocks(self.trunk).values())
        checkpoint_tower(self, blocks, spec.checkpointing, "model.image.checkpointing")

    def forward(self, image_BCSS: Tensor) -> Tensor:
        features_BD: Tensor = self.projection(self.trunk(image_BCSS))
        return features_BD

    def set_patch_dropout(self, share: float) -> None:
        """The share of each image's patches that training leaves out from now on, where that is `varying`."""
        if self.varying.patch_dropout:
            self.trunk.patch_drop.prob = share

    def positional_embeddings(self) -> set[str]:
        """Names of the learned absolute positional embeddings, of the attention pool too: timm's pos_embed*."""
        return {name for name, _ in self.named_parameters() if _leaf(name).startswith("pos_embed")}

    def class_tokens(self) -> set[str]:
        """Names of the learned tokens that join the image's own: class, register, and the query that pools."""
        tokens = ("cls_token", "dist_token", "reg_token", "latent")
        return {name for name, _ in self.named_parameters() if _leaf(name).startswith(tokens)}


def _trunk(spec: ImageTowerSpec, quick_gelu: bool, varying: Varying) -> Any:
    """timm's model without a classifier: [B, 3, S, S] -> [B, features]. Raises ConfigError for what timm refuses."""
    options = {**_size_option(spec), **spec.options}
    rehearsed = _rehearse(spec, options)
    if quick_gelu and isinstance(rehearsed, VisionTransformer):  # the GELUs of others are not CLIP's to replace
        options = {"act_layer": "quick_gelu", **options}
    if varying.sizes:
        options = _with_sizes(spec, options, varying.sizes)
    if varying.patch_dropout:
        options = _with_patch_dropout(spec, options)
    return timm.create_model(spec.timm, pretrained=False, num_classes=0, **options)


def _rehearse(spec: ImageTowerSpec, options: dict[str, Any]) -> Any:
    """The trunk without memory. Raises ConfigError for anything that timm or torch say."""
    try:
        return _rehearsed(spec.timm, options, [spec.size])
    except Exception as error:
        raise ConfigError(
            f"model.image.size={spec.size} and model.image.options={spec.options} do not fit timm's {spec.timm} "
            f"({_reason(error)}): give a size and arguments that this architecture takes"
        ) from error


def _rehearsed(name: str, options: dict[str, Any], sizes: Sequence[int]) -> Any:
    """The trunk without memory, after an image of each size without memory: what does not fit shows at once, for under
    0.5 s. Raises what timm or torch say about arguments they did not foresee."""
    with torch.device("meta"), torch.no_grad():
        trunk = timm.create_model(name, pretrained=False, num_classes=0, **options).eval()
        for size in sizes:
            shape = list(trunk(torch.empty(1, 3, size, size)).shape)
            require(shape == [1, trunk.head_hidden_size], f"it gives {shape} for an image instead of one vector")
        return trunk


def _with_sizes(spec: ImageTowerSpec, options: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """The options with which a trunk takes images of other sizes too; timm interpolates a ViT's positional embedding.

    Raises ConfigError for a size that does not fit.
    """
    with contextlib.suppress(TypeError):  # timm's, where an architecture knows no such option
        _rehearsed(spec.timm, {"dynamic_img_size": True, **options}, [])
        options = {"dynamic_img_size": True, **options}
    for size in sizes:
        try:
            _rehearsed(spec.timm, options, [size])
        except Exception as error:
            raise ConfigError(
                f"stages: image_size={size} does not fit timm's {spec.timm} made for model.image.size={spec.size} "
                f"({_reason(error)}): give a size that it takes as well, a ViT's a multiple of its patches"
            ) from error
    return options


def _with_patch_dropout(spec: ImageTowerSpec, options: dict[str, Any]) -> dict[str, Any]:
    """The options that give a trunk timm's own patch dropout. Raises ConfigError where timm has none for it."""
    require(
        "patch_drop_rate" not in spec.options,
        f"model.image.options={spec.options} has patch_drop_rate, and so has this run a patch_dropout: leave one out",
    )
    options = {**options, "patch_drop_rate": 0.5}  # any but 0, with which there would be no module to set
    try:
        dropout = _rehearsed(spec.timm, options, [spec.size]).patch_drop
        require(isinstance(dropout, PatchDropout | PatchDropoutWithIndices), "it has another kind")
    except Exception as error:
        raise ConfigError(
            f"model.image.timm={spec.timm} knows no patch dropout ({_reason(error)}): choose a ViT, such as "
            "model=vit_b16, or leave model.patch_dropout and the stages' at 0"
        ) from error
    return options


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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


def _projection(trunk: Any, embed_dim: int, spec: ImageTowerSpec) -> nn.Module:
    """Features -> [B, D]. An attention pool (CLIP's ResNets) has a projection of its own, which then gives D.

    Raises ConfigError for another projection than that, and where there is none and the features are not D.
    """
    pool = next((m for m in trunk.children() if isinstance(m, AttentionPool2d | RotAttentionPool2d)), None)
    if pool is not None:
        require(
            spec.projection is Projection.linear,
            f"model.image.projection={spec.projection} has no effect on {spec.timm}, whose attention pool projects: "
            "leave it out",
        )
        trunk.reset_classifier(embed_dim)
        nn.init.normal_(pool.proj.weight, std=pool.proj.in_features**-0.5)
        return nn.Identity()
    if spec.projection is Projection.head:
        trunk.reset_classifier(embed_dim)
        return nn.Identity()
    width = trunk.head_hidden_size
    if spec.projection is Projection.none:
        require(
            width == embed_dim,
            f"model.image.projection=none needs model.embed_dim={width}, which is what {spec.timm} gives, not "
            f"{embed_dim}: set it, or leave the projection out",
        )
        return nn.Identity()
    projection = nn.Linear(width, embed_dim, bias=False)
    nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
    return projection


def is_clip_vit(trunk: Any) -> bool:
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
