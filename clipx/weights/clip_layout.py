"""Tensor names of a ClipSpec in open_clip's layouts: see open_clip.py."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import AttentionPool2d
from timm.models import ByobNet, VisionTransformer
from torch import nn

from clipx.config.registry import kinds
from clipx.errors import CheckpointError
from clipx.model.spec import ClipSpec
from clipx.model.text_spec import ClipTextSpec, Pool, TextProjection, TextTowerSpec
from clipx.weights.key_mapping import Rule, fits, rules_with

if TYPE_CHECKING:
    from clipx.weights.clip_config import ConfigSection

_BLOCK = {
    "norm1.*": "ln_1.*",
    "norm2.*": "ln_2.*",
    "attn.qkv.*": "attn.in_proj_*",
    "attn.proj.*": "attn.out_proj.*",
    "mlp.fc1.*": "mlp.c_fc.*",
    "mlp.fc2.*": "mlp.c_proj.*",
    "ls1.gamma": "ls_1.gamma",
    "ls2.gamma": "ls_2.gamma",
}
_RESNET_BLOCK = {
    "conv1_1x1.conv.*": "conv1.*",
    "conv1_1x1.bn.*": "bn1.*",
    "conv2_kxk.conv.*": "conv2.*",
    "conv2_kxk.bn.*": "bn2.*",
    "conv3_1x1.conv.*": "conv3.*",
    "conv3_1x1.bn.*": "bn3.*",
    "shortcut.conv.conv.*": "downsample.0.*",
    "shortcut.conv.bn.*": "downsample.1.*",
}
_RESNET_STAGES = 4


def blocks(ours: str, theirs: str) -> list[Rule]:
    """Returns the rules of transformer blocks, whose names begin with `ours` in clipx and `theirs` in open_clip."""
    return rules_with(f"{ours}#.", f"{theirs}#.", _BLOCK)


VIT = [
    Rule("image.trunk.cls_token", "visual.class_embedding", ones=2),
    Rule("image.trunk.pos_embed", "visual.positional_embedding", ones=1),
    Rule("image.trunk.patch_embed.proj.weight", "visual.conv1.weight"),
    Rule("image.trunk.norm_pre.*", "visual.ln_pre.*"),
    *blocks("image.trunk.blocks.", "visual.transformer.resblocks."),
    Rule("image.trunk.norm.*", "visual.ln_post.*"),
    Rule("image.trunk.fc_norm.*", "visual.ln_post.*"),  # of the pooled patches
    Rule("image.projection.weight", "visual.proj", turned=True),
]
"""A ViT of timm in the form of CLIP or CLIPA, which open_clip implements itself."""

RESNET = [
    Rule("image.trunk.stem.conv#.conv.weight", "visual.conv#.weight"),
    Rule("image.trunk.stem.conv#.bn.*", "visual.bn#.*"),
    *(
        Rule(f"image.trunk.stages.{stage}.#.{here}", f"visual.layer{stage + 1}.#.{there}")
        for stage in range(_RESNET_STAGES)
        for here, there in _RESNET_BLOCK.items()
    ),
    Rule("image.trunk.head.pos_embed", "visual.attnpool.positional_embedding"),
    Rule("image.trunk.head.proj.*", "visual.attnpool.c_proj.*"),
    *(Rule(f"image.trunk.head.{x}.*", f"visual.attnpool.{x}_proj.*") for x in "qkv"),
]
"""A ResNet of timm with OpenAI's stem and attention pool."""

TIMM = [
    Rule("image.trunk.**", "visual.trunk.**"),
    Rule("image.projection.weight", "visual.head.proj.weight"),
    Rule("image.projection.fc#.*", "visual.head.mlp.fc#.*"),
]
"""Any timm architecture, which open_clip wraps unchanged."""


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Conversions of one kind of text tower."""

    rules: Callable[[str, Any], list[Rule]]  # arguments: prefix of open_clip's names, spec
    config_of: Callable[[Any], dict[str, Any]]  # returns text_cfg
    spec_of: Callable[[ConfigSection], TextTowerSpec]  # argument: text_cfg
    recognizes: Callable[[ConfigSection], bool] = lambda section: False


def text_layout(spec: TextTowerSpec) -> TextLayout:
    """Returns the layout of a text tower. Raises CheckpointError for a tower that open_clip does not have."""
    if spec.open_clip_layout is None:
        raise CheckpointError(
            f"open_clip has no layout for model.text.kind={spec.kind}: export it with format=safetensors"
        )
    layout: TextLayout = pkgutil.resolve_name(spec.open_clip_layout)
    return layout


def text_layout_for(section: ConfigSection) -> TextLayout:
    """Returns the layout of a text_cfg: that of a kind of text tower that recognizes it, else CLIP's."""
    places = {kind.open_clip_layout: None for kind in kinds("text").values() if kind.open_clip_layout is not None}
    known: list[TextLayout] = [pkgutil.resolve_name(place) for place in places]
    return next((layout for layout in known if layout.recognizes(section)), text_layout(ClipTextSpec()))


def text(prefix: str, spec: ClipTextSpec) -> list[Rule]:
    """Returns the rules of clipx's own text tower. `prefix`: prefix of open_clip's names."""
    bias = spec.projection_bias  # open_clip then has another module
    projection = [Rule("text.projection.weight", f"{prefix}text_projection", turned=True)]
    return [
        Rule("text.token_embedding.weight", f"{prefix}token_embedding.weight"),
        Rule("text.positional_embedding", f"{prefix}positional_embedding"),
        *blocks("text.blocks.", f"{prefix}transformer.resblocks."),
        Rule("text.norm.*", f"{prefix}ln_final.*"),
        *([Rule("text.projection.*", f"{prefix}text_projection.*")] if bias else projection),
    ]


def rules(spec: ClipSpec, theirs: Iterable[str] | None) -> list[Rule]:
    """Returns the rules of a model: see open_clip.ties."""
    if theirs is None:
        return [*image(spec), *_text("text." if is_custom(spec) else "", spec.text)]
    theirs = list(theirs)
    wrapped = any(name.startswith("visual.trunk.") for name in theirs)
    prefix = "text." if any(name.startswith("text.") for name in theirs) else ""
    return [*(TIMM if wrapped else image(spec)), *_text(prefix, spec.text)]


def _text(prefix: str, spec: TextTowerSpec) -> list[Rule]:
    return text_layout(spec).rules(prefix, spec)


def image(spec: ClipSpec) -> list[Rule]:
    return layout_of(spec.build(torch.device("meta"), torch.float32).image.trunk)


def layout_of(trunk: nn.Module) -> list[Rule]:
    """Returns VIT, RESNET or TIMM. VIT and RESNET require that every tensor of the trunk has a name of that form."""
    names = [f"image.trunk.{name}" for name in trunk.state_dict()]
    if _is_native_vit(trunk) and fits(VIT, names):
        return VIT
    if isinstance(trunk, ByobNet) and isinstance(trunk.head, AttentionPool2d) and fits(RESNET, names):
        return RESNET
    return TIMM


def _is_native_vit(trunk: nn.Module) -> bool:
    """Returns True for a ViT that open_clip can build itself, if its tensors have the names of that form."""
    return (
        isinstance(trunk, VisionTransformer)
        and trunk.global_pool in ("token", "avg")
        and (trunk.has_class_token, trunk.num_reg_tokens, trunk.no_embed_class) == (True, 0, False)
        and trunk.pos_embed is not None
        and not trunk.pool_include_prefix
    )


def is_custom(spec: ClipSpec) -> bool:
    """Returns True if open_clip's configuration needs `custom_text`, as for a text tower that is not CLIP's."""
    text_tower = spec.text
    return (
        not isinstance(text_tower, ClipTextSpec)
        or not text_tower.causal
        or text_tower.pool is not Pool.end
        or text_tower.projection_bias
        or text_tower.projection is TextProjection.none
    )
