"""Cheaper forms of timm's ViT modules: the class token alone in the last block, patches as one matrix product."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.runs import compose
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from clipx.model.batchnorm import to_dtype
from clipx.model.clip import CLIP
from clipx.model.vit import ClassTokenBlock, FoldedConv2d

CPU = torch.device("cpu")
CLIP_VIT = "model.image.timm=vit_base_patch16_clip_224"
SIZE = "model.image.size=48"
SMALL = "patch_size:16,embed_dim:64,depth:3,num_heads:2"


def build(name: str = CLIP_VIT, dtype: torch.dtype = torch.float64, **options: Any) -> CLIP:
    torch.manual_seed(0)
    further = "".join(f",{key}:{value}" for key, value in options.items())
    words = (name, SIZE, f"+model.image.options={{{SMALL}{further}}}", "model.text.width=32", "model.text.layers=1")
    model = compose(*words).model.build(CPU, dtype)
    for parameter in model.image.parameters():  # biases and scales that start at 0 or 1
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def plain(model: CLIP) -> CLIP:
    """Returns a copy of the model with timm's own modules."""
    with patch("clipx.model.vision.compute_class_token_only"), patch("clipx.model.vision.fold_normalization") as fold:
        fold.return_value = False
        twin = model.spec.build(CPU, next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict())
    trunk = twin.image.trunk
    assert (type(trunk.blocks[-1]), type(trunk.patch_embed.proj)) == (Block, nn.Conv2d)
    return twin


def images(count: int = 5) -> Tensor:
    random = torch.Generator().manual_seed(3)
    image = torch.randint(0, 256, (count, 3, 48, 48), dtype=torch.uint8, generator=random)
    return image.contiguous(memory_format=torch.channels_last)


def gradients(model: CLIP, image: Tensor) -> dict[str, Tensor]:
    image_BD = model.encode_image(image)
    (image_BD * torch.linspace(-1, 1, image_BD.numel(), dtype=image_BD.dtype).view_as(image_BD)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"embedding": image_BD.detach(), **found}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (CLIP_VIT, {}),
        (CLIP_VIT, {"qk_norm": True, "init_values": 0.1}),
        (CLIP_VIT, {"scale_attn_norm": True, "qkv_bias": False}),
        ("model.image.timm=vit_base_patch16_224", {"reg_tokens": 2}),  # a bias of the patches
        (CLIP_VIT, {"dynamic_img_size": True}),
    ],
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_embeddings_and_gradients_equal_those_of_timms_modules(
    name: str, options: dict[str, Any], layout: torch.memory_format
) -> None:
    model = build(name, **options)
    twin, image = plain(model), images().contiguous(memory_format=layout)
    assert isinstance(model.image.trunk.patch_embed.proj, FoldedConv2d)
    assert isinstance(model.image.trunk.blocks[-1], ClassTokenBlock)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_equal(gradients(model, image), gradients(twin, image))


def test_constants_of_the_normalization_stay_in_float32_in_a_16_bit_copy() -> None:
    model = to_dtype(build(dtype=torch.float32), torch.bfloat16)
    proj = model.image.trunk.patch_embed.proj
    assert {x.dtype for x in (model.image.mean_C11, model.image.std_C11, proj.mean_C, proj.std_C)} == {torch.float32}
    assert proj.weight.dtype == torch.bfloat16
    assert model.image.mean_C11[0].item() == pytest.approx(0.48145466, rel=1e-6)
    assert model.encode_image(images()).isfinite().all()


def test_other_trunks_take_normalized_images() -> None:
    model = compose("model.image.timm=resnet18", SIZE).model.build(CPU, torch.float32)
    assert not model.image.takes_pixels
    assert model._input(images()).dtype == torch.float32
    torch.testing.assert_close(model._input(images()), model._input(images() / 255))
