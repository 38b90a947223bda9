"""Where in its tower a parameter sits: what layer-wise decay and Muon go by."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from timm.models import group_parameters
from torch import nn

from clipx.errors import require
from clipx.model.clip import CLIP

_HEAD = "what stands above all blocks"


def blocks_above(model: CLIP, asked_by: str) -> dict[str, int]:
    """For each parameter, how many blocks of its tower lie above it: none for heads and projections, all for stems
    and embeddings. A norm between two blocks counts to one of them.

    Raises ConfigError naming `asked_by` for an image tower whose blocks timm does not know.
    """
    return {name: max(0, top - 1 - layer) for name, (layer, top) in _layers(model, asked_by).items()}


def hidden_matrices(model: CLIP, asked_by: str) -> set[str]:
    """Weights of linear layers, and of convolutions over all channels, inside the towers' blocks.

    Raises ConfigError as `blocks_above`.
    """
    within = {name for name, (layer, top) in _layers(model, asked_by).items() if 0 < layer < top}
    return within & {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }


def _layers(model: CLIP, asked_by: str) -> dict[str, tuple[int, int]]:
    """For each parameter its layer and its tower's top one. 0 is the stem, 1 the lowest block, top is the head."""
    image, text = _image_layers(model.image.trunk, asked_by), len(model.text.blocks) + 1
    layers: dict[str, tuple[int, int]] = {}
    for name, _ in model.named_parameters():
        if name.startswith("image.trunk."):
            layers[name] = image[name.removeprefix("image.trunk.")], image[_HEAD]
        elif block := re.match(r"text\.blocks\.(\d+)\.", name):
            layers[name] = int(block[1]) + 1, text
        elif name.startswith("text.token_embedding.") or name == "text.positional_embedding":
            layers[name] = 0, text
        else:
            layers[name] = text, text
    return layers


def _image_layers(trunk: Any, asked_by: str) -> dict[str, int]:
    """timm's own grouping, and the layer above its blocks, which a trunk without a head has no parameter in."""
    require(
        hasattr(trunk, "group_matcher"),
        f"{asked_by} goes by the image tower's blocks, which timm does not tell of a {type(trunk).__name__}: "
        "leave it out, or choose another model.image.timm",
    )
    named = SimpleNamespace(named_parameters=lambda: [*trunk.named_parameters(), (_HEAD, None)])
    layers: dict[str, int] = group_parameters(named, trunk.group_matcher(coarse=False), reverse=True)
    return layers
