"""The image tower: features of a ResNet, initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower

SMALL_VIT = {"patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}


def tower(name: str, size: int = 224, device: str = "meta", **options: Any) -> ImageTower:
    torch.manual_seed(0)
    with torch.device(device):
        return ImageTower(ImageTowerSpec(timm=name, size=size, options=options), 64, False)


def assert_std(weight: torch.Tensor, std: float) -> None:
    assert weight.std().item() == pytest.approx(std, rel=4 / (2 * weight.numel()) ** 0.5)  # four standard errors


def test_a_clip_vit_is_initialized_like_clip_outside_and_timm_inside_its_blocks() -> None:
    """Another ViT is initialized like timm, and its projection like CLIP's."""
    built = tower("vit_base_patch16_clip_224", 64, device="cpu", **SMALL_VIT)
    for weight in (built.trunk.cls_token, built.trunk.pos_embed, built.projection.weight):
        assert_std(weight, 192**-0.5)
    assert_std(built.trunk.patch_embed.proj.weight, (3 * 8 * 8) ** -0.5 / 3**0.5)  # PyTorch: uniform to fan_in^-.5
    for block in built.trunk.blocks:
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
            assert_std(layer.weight, 0.02)
            assert not layer.bias.any()
    other = tower("vit_base_patch16_224", 64, device="cpu", **SMALL_VIT)
    assert_std(other.trunk.pos_embed, 0.02)
    assert other.trunk.cls_token.abs().max() < 1e-5
    assert_std(other.projection.weight, 192**-0.5)
