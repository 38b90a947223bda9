"""Where in its tower a parameter sits: what layer-wise decay and Muon go by."""

from __future__ import annotations

from torch import nn

from clipx.model.clip import CLIP
from clipx.model.layers import parameter_layers


def blocks_above(model: CLIP, asked_by: str) -> dict[str, int]:
    """For each parameter, how many blocks of its tower lie above it: none for heads and projections, all for stems
    and embeddings. A norm between two blocks counts to one of them.

    Raises ConfigError naming `asked_by` for an image tower whose blocks timm does not know.
    """
    return {name: max(0, top - 1 - layer) for name, (layer, top) in parameter_layers(model, asked_by).items()}


def hidden_matrices(model: CLIP, asked_by: str) -> set[str]:
    """Weights of linear layers, and of convolutions over all channels, inside the towers' blocks.

    Raises ConfigError as `blocks_above`.
    """
    within = {name for name, (layer, top) in parameter_layers(model, asked_by).items() if 0 < layer < top}
    return within & {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }
