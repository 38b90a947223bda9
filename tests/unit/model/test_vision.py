"""The image tower: features of a ResNet, initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from open_clip.modified_resnet import ModifiedResNet  # type: ignore[import-untyped]
from timm.models.byobnet import checkpoint_filter_fn
from torch import nn

from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower

SMALL_VIT = {"patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}


def tower(name: str, size: int = 224, device: str = "meta", **options: Any) -> ImageTower:
    torch.manual_seed(0)
    with torch.device(device):
        return ImageTower(ImageTowerSpec(timm=name, size=size, options=options), 64, False)


@torch.no_grad()
def test_resnet_features_equal_those_of_open_clip() -> None:
    torch.manual_seed(1)
    twin = ModifiedResNet(layers=[3, 4, 6, 3], output_dim=64, heads=32, image_size=96).eval()
    for bn in (m for m in twin.modules() if isinstance(m, nn.BatchNorm2d)):
        for value in (bn.weight, bn.bias, bn.running_mean):
            assert value is not None
            value += 0.1 * torch.randn_like(value)
    built = tower("resnet50_clip", 96, device="cpu").eval()
    weights = {f"visual.{name}": value for name, value in twin.state_dict().items()}
    built.trunk.load_state_dict(checkpoint_filter_fn(weights, built.trunk))
    pixels = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(built(pixels), twin(pixels), rtol=1e-4, atol=1e-5)


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
