"""Cheaper forms of two modules of timm's ViT, with the same parameters and results.

* The last block computes only the class token, if the trunk is pooled at it.
* Patches are a matrix product of uint8 pixels, with the normalization of the image in weight and bias.

Shape suffixes: B batch, C colour channels (3), S side of the image in pixels, P side of a patch, G patches along it,
N tokens of an image, W width.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import Attention, Mlp, PatchEmbed
from timm.models import VisionTransformer
from timm.models.vision_transformer import Block
from torch import Tensor, nn

_CENTER = 128  # subtracted from pixels: halves the rounding error of a product in 16 bits, and is exact


class SharedBlock(nn.Module):
    """Base class of modules that compute timm's block in another way, with its parts under their names."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = block.norm1, block.attn, block.ls1, block.drop_path1
        self.norm2, self.mlp, self.ls2, self.drop_path2 = block.norm2, block.mlp, block.ls2, block.drop_path2


class ClassTokenBlock(SharedBlock):
    """timm's block, computed for the class token alone. [B, N, W] -> [B, 1, W]."""

    def forward(self, x_BNW: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        mixed_B1W = _class_token_attention(self.attn, self.norm1(x_BNW))
        x_B1W = x_BNW[:, :1] + self.drop_path1(self.ls1(mixed_B1W))
        out_B1W: Tensor = x_B1W + self.drop_path2(self.ls2(self.mlp(self.norm2(x_B1W))))
        return out_B1W


def _class_token_attention(attn: Any, x_BNW: Tensor) -> Tensor:
    """Attends from the class token to all tokens. [B, N, W] -> [B, 1, W]."""
    q_B1W, kv_BNW = _queries_keys_values(attn.qkv, x_BNW, attn.attn_dim)
    q_BH1K = q_B1W.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
    k_BHNK, v_BHNK = kv_BNW.unflatten(-1, (2, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed_BH1K = F.scaled_dot_product_attention(attn.q_norm(q_BH1K), attn.k_norm(k_BHNK), v_BHNK)
    out_B1W: Tensor = attn.proj(attn.norm(mixed_BH1K.transpose(1, 2).flatten(2)))
    return out_B1W


def _queries_keys_values(qkv: nn.Module, x_BNW: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the query of the class token [B, 1, W], keys and values of all tokens [B, N, 2W]."""
    if type(qkv) is not nn.Linear:  # a layer in another number format, whose weight cannot be split
        q_BNW, kv_BNW = qkv(x_BNW).split((width, 2 * width), -1)
        return q_BNW[:, :1], kv_BNW
    q_weight, kv_weight = qkv.weight.split((width, 2 * width))
    q_bias, kv_bias = (None, None) if qkv.bias is None else qkv.bias.split((width, 2 * width))
    return F.linear(x_BNW[:, :1], q_weight, q_bias), F.linear(x_BNW, kv_weight, kv_bias)


def compute_class_token_only(trunk: Any) -> None:
    """Replaces the last block of `trunk` by a ClassTokenBlock, if nothing else reads its other tokens.

    Leaves other trunks, and blocks with dropout inside, whose masks would differ.
    """
    if type(trunk) is not VisionTransformer or trunk.global_pool != "token" or trunk.attn_pool is not None:
        return
    last = trunk.blocks[-1]
    norms = (trunk.norm, trunk.fc_norm, *(m for m in last.modules() if "Norm" in type(m).__name__))
    if (
        (type(last), type(last.attn), type(last.mlp)) == (Block, Attention, Mlp)
        and all(isinstance(norm, nn.LayerNorm | nn.Identity) for norm in norms)
        and not any(isinstance(m, nn.Dropout) and m.p for m in last.modules())
        and last.attn.gate is None
        and last.attn.fused_attn
    ):
        trunk.blocks[-1] = ClassTokenBlock(last)


class FoldedConv2d(nn.Conv2d):
    """Convolution of patches, which takes uint8 pixels too: [B, 3, S, S] -> [B, W, G, G]."""

    constants: ClassVar[tuple[str, ...]] = ("mean_C", "std_C")
    mean_C: Tensor
    std_C: Tensor

    def __init__(self, conv: nn.Conv2d, mean_C: Tensor, std_C: Tensor) -> None:
        """Takes the parameters of `conv`. `mean_C`, `std_C`: of pixel values in [0, 1], in float32 or wider."""
        side: Any = conv.kernel_size
        super().__init__(conv.in_channels, conv.out_channels, side, side, device="meta")  # draws no random numbers
        self.weight, self.bias = conv.weight, conv.bias
        for name, constant in (("mean_C", mean_C), ("std_C", std_C)):
            self.register_buffer(name, constant.clone(), persistent=False)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        if image_BCSS.dtype != torch.uint8:
            return super().forward(image_BCSS)
        dtype = product_dtype(self.weight)
        weight_WX, bias_W = folded(self.weight.permute(0, 2, 3, 1), self.bias, self.mean_C, self.std_C)
        height, width = self.kernel_size
        patches_BGGX = _patches(image_BCSS, height, width, dtype)
        return F.linear(patches_BGGX, weight_WX.to(dtype), bias_W.to(dtype)).permute(0, 3, 1, 2)


def folded(weight_WPPC: Tensor, bias_W: Tensor | None, mean_C: Tensor, std_C: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight [W, P * P * C] and bias [W] for pixels minus 128, from those for normalized pixels: in float32 or
    wider. `mean_C`, `std_C`: of pixel values in [0, 1]."""
    scale_C = 1 / (255 * std_C)
    shift_C = _CENTER - 255 * mean_C
    scaled_WPPC = weight_WPPC.to(scale_C.dtype) * scale_C
    shifted_W = (scaled_WPPC * shift_C).sum((1, 2, 3))
    return scaled_WPPC.flatten(1), shifted_W if bias_W is None else shifted_W + bias_W


def centered(pixels: Tensor) -> Tensor:
    """Returns uint8 pixels minus 128, as int8."""
    return pixels.bitwise_xor(_CENTER).view(torch.int8)


def _patches(image_BCSS: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns pixels minus 128 of each patch, [B, G, G, P * P * C], in one copy."""
    centered_BCSS = centered(image_BCSS)
    rows, columns = image_BCSS.shape[2] // height, image_BCSS.shape[3] // width
    cropped_BCSS = centered_BCSS[:, :, : rows * height, : columns * width]
    view = cropped_BCSS.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 3, 5, 1)
    return torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view).flatten(3)


def product_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of products with a weight: that of autocast, if it is on."""
    kind = weight.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # FLOPs are counted on meta tensors
    return torch.get_autocast_dtype(kind) if on else weight.dtype


def fold_normalization(trunk: Any, mean_C: Tensor, std_C: Tensor) -> bool:
    """Replaces the convolution of a patch embedding by a FoldedConv2d. Returns False for other trunks and channels.

    `mean_C`, `std_C`: of pixel values in [0, 1], in float32 or wider.
    """
    if type(trunk) is not VisionTransformer or type(trunk.patch_embed) is not PatchEmbed:
        return False
    embed = trunk.patch_embed
    if embed.dynamic_img_pad or embed.proj.weight.shape[1] != len(mean_C):
        return False
    embed.proj = FoldedConv2d(embed.proj, mean_C, std_C)
    return True
