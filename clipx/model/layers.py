"""The layer of each parameter in its tower, for layer-wise decay, Muon and freezing."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from timm.models import group_parameters

from clipx.errors import require
from clipx.model.blocks import named_blocks
from clipx.model.clip import CLIP

_HEAD = "what stands above all blocks"
_TEXT_STEM = ("text.positional_embedding", "text.class_token")


def parameter_layers(model: CLIP, asked_by: str) -> dict[str, tuple[int, int]]:
    """For each parameter its layer and its tower's top one. 0 is the stem, 1 the lowest block, top is the head. A norm
    between two blocks counts to one of them.

    Raises ConfigError naming `asked_by` for an image tower whose blocks timm does not know.
    """
    image, text = _image_layers(model.image.trunk, asked_by), len(model.text.blocks) + 1
    decoder = 1 + sum(name.startswith("decoder.") for name in named_blocks(model))
    found: dict[str, tuple[int, int]] = {}
    for name, _ in model.named_parameters():
        if name.startswith("image.trunk."):
            found[name] = image[name.removeprefix("image.trunk.")], image[_HEAD]
        elif name.startswith("image."):
            found[name] = image[_HEAD], image[_HEAD]
        elif block := re.match(r"text\.blocks\.(\d+)\.", name):
            found[name] = int(block[1]) + 1, text
        elif block := re.match(r"decoder\.blocks\.(\d+)\.", name):  # a tower of its own: the text's ends below it
            found[name] = int(block[1]) + 1, decoder
        elif name.startswith("decoder."):
            found[name] = decoder, decoder
        elif name.startswith("text.token_embedding.") or name in _TEXT_STEM:
            found[name] = 0, text
        else:
            found[name] = text, text
    return found


def _image_layers(trunk: Any, asked_by: str) -> dict[str, int]:
    """timm's own grouping, and the layer above its blocks, which a trunk without a head has no parameter in."""
    require(
        hasattr(trunk, "group_matcher"),
        f"{asked_by} goes by the image tower's blocks, which timm does not tell of a {type(trunk).__name__}: "
        "leave it out, or choose another model.image.timm",
    )
    named = SimpleNamespace(named_parameters=lambda: [*trunk.named_parameters(), (_HEAD, None)])
    grouped: dict[str, int] = group_parameters(named, trunk.group_matcher(coarse=False), reverse=True)
    return grouped
