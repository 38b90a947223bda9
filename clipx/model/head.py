"""Transformer blocks above a frozen ViT, and the pooling of their tokens (dino.txt, arXiv:2412.16334).

Shape suffixes: B batch, N tokens of an image, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import SwiGLU
from timm.models import Eva, VisionTransformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from clipx.errors import require
from clipx.model.tower_spec import ImageTowerSpec

# As in DINOv2.
_SCALE = 1e-5  # initial factor of the branches of a block: the blocks begin close to the identity
_STD = 0.02  # of initial weights
_ALIGNED = 64  # the width within the MLP is a multiple of it


class TokenHead(nn.Module):
    """Tokens of the trunk [B, N, W] -> class token and mean of the patch tokens of the last block [B, 2W].

    The blocks have the form of the authors': pre-norm with PyTorch's epsilon, as many heads as the trunk, no bias of
    queries, keys and values, SwiGLU of two thirds of 4 W, and scales of their branches.
    """

    def __init__(self, trunk: Any, spec: ImageTowerSpec) -> None:
        """Raises ConfigError for a trunk that is not a ViT pooled at its class token."""
        super().__init__()
        _check_trunk(trunk, spec)
        self.prefix: int = trunk.num_prefix_tokens
        width: int = trunk.embed_dim
        self.width = 2 * width
        heads = trunk.blocks[0].attn.num_heads
        options: dict[str, Any] = {"norm_layer": nn.LayerNorm, "act_layer": nn.SiLU, "mlp_layer": _mlp}
        self.blocks = nn.ModuleList(
            Block(width, heads, init_values=_SCALE, drop_path=spec.head_drop_path, **options)
            for _ in range(spec.head_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.apply(_init)

    def forward(self, x_BNW: Tensor) -> Tensor:
        for block in self.blocks:
            x_BNW = block(x_BNW)
        x_BNW = self.norm(x_BNW)
        return torch.cat([x_BNW[:, 0], x_BNW[:, self.prefix :].mean(1)], -1)


def _mlp(in_features: int, hidden_features: int, **options: Any) -> nn.Module:
    """Builds the MLP of a block. `hidden_features`: of an MLP with two weights, as many as it has with three."""
    mlp: nn.Module = SwiGLU(in_features, 2 * hidden_features // 3, align_to=_ALIGNED, **options)
    return mlp


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check_trunk(trunk: Any, spec: ImageTowerSpec) -> None:
    pooled_at_class = (
        isinstance(trunk, VisionTransformer | Eva)
        and trunk.cls_token is not None
        and trunk.global_pool == "token"
        and isinstance(trunk.fc_norm, nn.Identity)
        and getattr(trunk, "attn_pool", None) is None
    )
    require(
        pooled_at_class,
        f"model.image.head_blocks={spec.head_blocks} needs a ViT that timm pools at its class token, which "
        f"{spec.timm} is not: choose one, such as vit_small_patch14_reg4_dinov2, or give "
        "model.image.options.global_pool=token",
    )
