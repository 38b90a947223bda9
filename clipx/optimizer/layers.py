"""Positions of parameters within the towers, for layer-wise learning-rate decay and Muon."""

from __future__ import annotations

from torch import nn

from clipx.model.clip import CLIP
from clipx.model.layers import parameter_layers


def blocks_above(model: CLIP, asked_by: str) -> dict[str, int]:
    """Returns the number of blocks above each parameter in its tower: none for heads and projections, all for stems
    and embeddings. A norm between two blocks belongs to one of them.

    Raises ConfigError, which names the option `asked_by`, for an image tower whose blocks timm does not list.
    """
    return {name: max(0, top - 1 - layer) for name, (layer, top) in parameter_layers(model, asked_by).items()}


def hidden_matrices(model: CLIP, asked_by: str) -> set[str]:
    """Returns the names of the weights of linear layers and ungrouped convolutions inside the towers' blocks.

    Raises ConfigError like `blocks_above`.
    """
    within = {name for name, (layer, top) in parameter_layers(model, asked_by).items() if 0 < layer < top}
    return within & {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }
