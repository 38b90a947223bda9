"""Blocks above a locked trunk (dino.txt)."""

from __future__ import annotations

import torch
from helpers.runs import compose
from timm.models.vision_transformer import Block

from clipx.model.clip import CLIP
from clipx.model.freeze import freeze

DINO = (
    "model.image.timm=vit_small_patch14_reg4_dinov2",
    "model.image.size=56",
    "model.image.options={depth:2,embed_dim:48,num_heads:4}",
    "model.image.head_blocks=2",
)


def build() -> CLIP:
    torch.manual_seed(0)
    spec = compose("model=tiny", *DINO).model
    model = spec.build(torch.device("cpu"), torch.float32)
    freeze(model, spec)
    return model


def test_the_embedding_is_a_projection_of_class_token_and_mean_patch() -> None:
    model = build().eval()
    image_BCSS = torch.rand(2, 3, 56, 56)
    trunk, head = model.image.trunk, model.image.head
    assert head is not None
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        x_BNW = trunk.forward_features((image_BCSS - model.mean_C11) / model.std_C11)
        for block in head.blocks:
            assert isinstance(block, Block)
            x_BNW = block(x_BNW)
        x_BNW = head.norm(x_BNW)
        patches = (56 // 14) ** 2
        assert x_BNW.shape[1] == patches + trunk.num_prefix_tokens
        both_BX = torch.cat([x_BNW[:, 0], x_BNW[:, -patches:].mean(1)], 1)
        expected = torch.nn.functional.normalize(both_BX @ model.image.projection.weight.T, dim=-1)
        torch.testing.assert_close(model.encode_image(image_BCSS), expected, rtol=0, atol=1e-6)
        pooled_BW = trunk((image_BCSS - model.mean_C11) / model.std_C11)
        torch.testing.assert_close(model.encode_trunk(image_BCSS), pooled_BW, rtol=0, atol=1e-6)
    assert model.trunk_width == pooled_BW.shape[1]
