"""The image tower: architectures of timm, the projection, initial weights, and errors with their fix."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from open_clip.modified_resnet import ModifiedResNet  # type: ignore[import-untyped]
from timm.layers import QuickGELU
from timm.models.byobnet import checkpoint_filter_fn
from torch import nn

from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower

SMALL_VIT = {"patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3}


def tower(name: str, size: int = 224, device: str = "meta", quick_gelu: bool = False, **options: Any) -> ImageTower:
    torch.manual_seed(0)
    with torch.device(device):
        return ImageTower(ImageTowerSpec(timm=name, size=size, options=options), 64, quick_gelu)


# ------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_base_patch32_clip_224", 160),
        pytest.param("vit_base_patch16_siglip_224", 96, marks=pytest.mark.slow),
        ("resnet50_clip", 288),
        pytest.param("resnet50_clip_gap", 192, marks=pytest.mark.slow),
        pytest.param("resnet18", 130, marks=pytest.mark.slow),
        ("convnext_tiny", 64),
        pytest.param("mobilenetv3_small_050", 96, marks=pytest.mark.slow),
        pytest.param("swin_tiny_patch4_window7_224", 256, marks=pytest.mark.slow),
        ("eva02_tiny_patch14_224", 70),
        ("vgg11_bn", 224),
    ],
)
@pytest.mark.parametrize("quick_gelu", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_timm_architectures_build_at_any_supported_size(name: str, size: int, quick_gelu: bool) -> None:
    image_BCSS = torch.empty(2, 3, size, size, device="meta")
    assert tower(name, size, quick_gelu=quick_gelu)(image_BCSS).shape == (2, 64)


def test_the_projection_is_a_single_matrix_or_the_attention_pool_of_a_clip_resnet() -> None:
    names = [name for name, _ in tower("convnext_tiny").named_parameters() if not name.startswith("trunk.")]
    assert names == ["projection.weight"]
    built = tower("resnet50_clip")
    assert not list(built.projection.parameters())
    assert built.trunk.head.proj.weight.shape == (64, 2048)


def test_options_are_passed_to_timm_and_override_defaults() -> None:
    assert tower("vit_base_patch16_clip_224", 32, **SMALL_VIT).trunk.pos_embed.shape == (1, 17, 192)
    block = tower("vit_base_patch16_clip_224", 32, quick_gelu=True, act_layer="relu", depth=1).trunk.blocks[0]
    assert isinstance(block.mlp.act, nn.ReLU)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("vit_base_patch32_clip_224", {QuickGELU}), ("convnext_tiny", {nn.GELU}), ("resnet50_clip", set())],
)
def test_quick_gelu_replaces_only_the_gelu_of_a_vit(name: str, expected: set[type]) -> None:
    activations = {type(m) for m in tower(name, quick_gelu=True).modules()}
    gelus = {timm.layers.GELU, nn.GELU, QuickGELU}
    assert {nn.GELU if t is timm.layers.GELU else t for t in activations & gelus} == expected


def test_names_of_positional_embeddings_and_tokens() -> None:
    siglip = tower("vit_base_patch16_siglip_224", reg_tokens=2, class_token=True)
    assert siglip.positional_embeddings() == {"trunk.pos_embed"}
    assert siglip.class_tokens() == {"trunk.cls_token", "trunk.reg_token", "trunk.attn_pool.latent"}
    assert tower("resnet50_clip").positional_embeddings() == {"trunk.head.pos_embed"}
    assert tower("resnet18").positional_embeddings() == tower("resnet18").class_tokens() == set()


# ----------------------------------------------------------------------------------------------- against open_clip


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


# ------------------------------------------------------------------------------------------------- initial weights


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


def test_a_clip_resnet_has_clip_pool_weights_and_zero_residual_branches() -> None:
    trunk = tower("resnet50_clip", 64, device="cpu").trunk
    pool = trunk.head
    for weight in (pool.q.weight, pool.k.weight, pool.v.weight, pool.proj.weight, pool.pos_embed):
        assert_std(weight, 2048**-0.5)
    assert not any(block.conv3_1x1.bn.weight.any() for stage in trunk.stages for block in stage)
