"""The towers' blocks: what is recomputed, compiled or converted one by one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


def named_blocks(model: CLIP) -> dict[str, nn.Module]:
    """The blocks of both towers by name, lowest first, then a decoder's; of an image tower whose blocks timm does not
    tell none."""
    image = {f"image.trunk.{name}": block for name, block in image_blocks(model.image.trunk).items()}
    others = {
        f"{name}.blocks": tower.get_submodule("blocks") for name, tower in model.named_children() if name != "image"
    }
    return image | {f"{name}.{i}": block for name, blocks in others.items() for i, block in blocks.named_children()}


def image_blocks(trunk: Any) -> dict[str, nn.Module]:
    """What timm counts as a block: a ViT's, a ResNet's bottlenecks, a ConvNeXt's blocks without what lies between."""
    if not hasattr(trunk, "group_matcher"):
        return {}
    matcher = trunk.group_matcher(coarse=False)  # of CaiT and its like a function, which names no blocks
    groups = matcher.get("blocks") or () if isinstance(matcher, dict) else ()
    patterns = [groups] if isinstance(groups, str) else [pattern for pattern, order in groups if order is None]
    return {
        name: module
        for name, module in trunk.named_modules()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
    }
