"""Blocks of the towers, the units of activation checkpointing, compilation and precision conversion."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


def named_blocks(model: CLIP) -> dict[str, nn.Module]:
    """Returns the blocks of both towers by name, lowest first, then those of further parts that name theirs.

    An image tower whose blocks timm does not define contributes none.
    """
    image = {f"image.trunk.{name}": block for name, block in image_blocks(model.image.trunk).items()}
    if (head := model.image.head) is not None:
        image |= {f"image.head.blocks.{name}": block for name, block in head.blocks.named_children()}
    others = {
        f"{name}.{tower.blocks_name}": tower.get_submodule(str(tower.blocks_name))
        for name, tower in model.named_children()
        if name != "image" and hasattr(tower, "blocks_name")
    }
    return image | {f"{name}.{i}": block for name, blocks in others.items() for i, block in blocks.named_children()}


def image_blocks(trunk: Any) -> dict[str, nn.Module]:
    """Returns the blocks of a trunk by name, as timm groups them.

    Blocks of a ViT, bottlenecks of a ResNet, blocks of a ConvNeXt without the layers between its stages.
    """
    if not hasattr(trunk, "group_matcher"):
        return {}
    matcher = trunk.group_matcher(coarse=False)  # for some architectures, such as CaiT, a function: names no blocks
    groups = matcher.get("blocks") or () if isinstance(matcher, dict) else ()
    patterns = [groups] if isinstance(groups, str) else [pattern for pattern, order in groups if order is None]
    return {
        name: module
        for name, module in trunk.named_modules()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    }
