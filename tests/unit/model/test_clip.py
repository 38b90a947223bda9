"""The CLIP model: parameter counts of the published architectures, embeddings and initial weights."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.cases import slow_except
from helpers.runs import compose
from timm.models.vision_transformer import Block
from torch import Tensor

from clipx.config.registry import option_files
from clipx.model.clip import CLIP, parameter_count
from clipx.model.freeze import freeze
from clipx.model.spec import ClipSpec
from clipx.model.text import TextTower
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer
from clipx.model.tower_spec import ImageTowerSpec
from clipx.model.vision import ImageTower

CPU, META = torch.device("cpu"), torch.device("meta")

# Parameters including the temperature, parameters of the image tower, state_dict tensors including the temperature.
PUBLISHED = {
    "rn50": (102_007_137, 38_316_896, 489),
    "rn101": (119_688_033, 56_259_936, 795),
    "vit_s32": (63_085_825, 22_641_792, 302),
    "vit_s16": (62_257_537, 21_813_504, 302),
    "vit_m16": (102_015_489, 38_587_392, 302),
    "vit_b32": (151_277_313, 87_849_216, 302),
    "vit_b16": (149_620_737, 86_192_640, 302),
    "vit_l14": (427_616_513, 303_966_208, 446),
    "vit_h14": (986_109_441, 632_076_800, 686),
    "vit_g14": (1_366_678_273, 1_012_645_632, 782),
    "vit_bigg14": (2_539_567_105, 1_844_907_264, 974),
    "convnext_base_w": (179_385_345, 88_221_824, 493),
    "coca_vit_b32": (253_560_065, 89_164_032, 629),
    "vit_b16_siglip": (203_155_969, 92_884_224, 313),  # open_clip counts the bias of the loss too
}

UNPUBLISHED = ("tiny", "coca_tiny", "naflex_tiny", "vit_b16_siglip2_naflex")


def small_spec() -> ClipSpec:
    options = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    return ClipSpec(
        name="small",
        embed_dim=48,
        quick_gelu=False,
        image=ImageTowerSpec(timm="vit_base_patch16_clip_224", size=32, options=options),
        text=ClipTextSpec(context_length=12, width=64, heads=2, layers=3),
    )


def build(seed: int = 0, dtype: torch.dtype = torch.float32) -> CLIP:
    torch.manual_seed(seed)
    return small_spec().build(CPU, dtype).eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", slow_except([*PUBLISHED, *UNPUBLISHED], "rn50", "vit_b32", "vit_b16_siglip", "tiny"))
def test_an_architecture_has_the_counts_that_are_published_and_in_its_yaml(name: str) -> None:
    spec = compose(f"model={name}").model
    assert isinstance(spec, ClipSpec) and spec.name == name
    model = spec.build(META, torch.float32)
    counts = parameter_count(model) + 1, parameter_count(model.image), len(model.state_dict()) + 1
    assert counts == PUBLISHED.get(name, counts)
    assert all(parameter.is_meta for parameter in model.parameters())
    title = option_files("model")[name].read_text().splitlines()[0]
    stated = [int(n.replace(",", "")) for n in re.findall(r"\d+(?:,\d{3})+", title)]
    assert stated == [parameter_count(model), parameter_count(model.image)]
    if spec.kind == "clip":
        image = torch.empty(2, 3, spec.image.size, spec.image.size, dtype=torch.uint8, device=META)
        tokens = torch.empty(2, spec.text.context_length, dtype=torch.int64, device=META)
        assert [x.shape for x in model(image, tokens)] == [(2, spec.embed_dim)] * 2


@pytest.mark.parametrize(
    ("weights", "autocast", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
)
def test_embeddings_have_unit_norm_in_float32_or_wider(
    weights: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype, images: Tensor
) -> None:
    model, tokens = build(dtype=weights), Tokenizer(context_length=12)(["a photo of a cat", "two dogs", ""])
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        for embedding_BD in model(images, tokens):
            assert embedding_BD.dtype == expected
            torch.testing.assert_close(embedding_BD.norm(dim=-1), torch.ones(3, dtype=expected))


def test_uint8_and_float_images_give_equal_embeddings(images: Tensor) -> None:
    small = build()
    with torch.no_grad():
        torch.testing.assert_close(small.encode_image(images), small.encode_image(images / 255))


WIDTH, DEPTH = 192, 3


@pytest.fixture(scope="module")
def text_tower() -> TextTower:
    torch.manual_seed(0)
    return TextTower(ClipTextSpec(context_length=10, width=WIDTH, heads=3, layers=DEPTH), 64, quick_gelu=False)


@pytest.mark.parametrize(
    ("suffix", "std"),
    [
        ("token_embedding.weight", 0.02),
        ("positional_embedding", 0.01),
        ("attn.qkv.weight", WIDTH**-0.5),
        ("attn.proj.weight", WIDTH**-0.5 * (2 * DEPTH) ** -0.5),
        ("mlp.fc1.weight", (2 * WIDTH) ** -0.5),
        ("mlp.fc2.weight", WIDTH**-0.5 * (2 * DEPTH) ** -0.5),
        ("projection.weight", WIDTH**-0.5),
    ],
)
def test_initial_weights_are_normal_with_the_stds_of_clip(text_tower: TextTower, suffix: str, std: float) -> None:
    found = [p for name, p in text_tower.named_parameters() if name.endswith(suffix)]
    assert len(found) in (1, DEPTH)
    for weight in found:
        tolerance = 4 / (2 * weight.numel()) ** 0.5  # four standard errors of the estimate
        assert weight.std().item() == pytest.approx(std, rel=tolerance)
        assert abs(weight.mean().item()) < 4 * std / weight.numel() ** 0.5
        assert weight.abs().max() > 2.5 * std  # a uniform distribution ends at 1.7 std


def vit(name: str) -> ImageTower:
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 3}
    return ImageTower(ImageTowerSpec(timm=name, size=64, options=options), 64, False)


def assert_std(weight: Tensor, std: float) -> None:
    assert weight.std().item() == pytest.approx(std, rel=4 / (2 * weight.numel()) ** 0.5)  # four standard errors


def test_a_clip_vit_is_initialized_like_clip_outside_and_timm_inside_its_blocks() -> None:
    """Another ViT is initialized like timm, and its projection like CLIP's."""
    built = vit("vit_base_patch16_clip_224")
    for weight in (built.trunk.cls_token, built.trunk.pos_embed, built.projection.weight):
        assert_std(weight, WIDTH**-0.5)
    assert_std(built.trunk.patch_embed.proj.weight, (3 * 8 * 8) ** -0.5 / 3**0.5)  # PyTorch: uniform to fan_in^-.5
    for block in built.trunk.blocks:
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
            assert_std(layer.weight, 0.02)
            assert not layer.bias.any()
    other = vit("vit_base_patch16_224")
    assert_std(other.trunk.pos_embed, 0.02)
    assert other.trunk.cls_token.abs().max() < 1e-5
    assert_std(other.projection.weight, WIDTH**-0.5)


def test_the_embedding_is_a_projection_of_class_token_and_mean_patch() -> None:
    """Blocks above a locked trunk (dino.txt)."""
    torch.manual_seed(0)
    words = ("model.image.timm=vit_small_patch14_reg4_dinov2", "model.image.size=56", "model.image.head_blocks=2")
    spec = compose("model=tiny", *words, "model.image.options={depth:2,embed_dim:48,num_heads:4}").model
    model = spec.build(CPU, torch.float32).eval()
    freeze(model, spec)
    image_BCSS = torch.rand(2, 3, 56, 56)
    trunk, head = model.image.trunk, model.image.head
    assert head is not None
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        x_BNW = trunk.forward_features((image_BCSS - model.image.mean_C11) / model.image.std_C11)
        for block in head.blocks:
            assert isinstance(block, Block)
            x_BNW = block(x_BNW)
        x_BNW = head.norm(x_BNW)
        patches = (56 // 14) ** 2
        assert x_BNW.shape[1] == patches + trunk.num_prefix_tokens
        both_BX = torch.cat([x_BNW[:, 0], x_BNW[:, -patches:].mean(1)], 1)
        expected = torch.nn.functional.normalize(both_BX @ model.image.projection.weight.T, dim=-1)
        torch.testing.assert_close(model.encode_image(image_BCSS), expected, rtol=0, atol=1e-6)
        pooled_BW = trunk((image_BCSS - model.image.mean_C11) / model.image.std_C11)
        torch.testing.assert_close(model.encode_trunk(image_BCSS), pooled_BW, rtol=0, atol=1e-6)
    assert model.trunk_width == pooled_BW.shape[1]


@pytest.mark.parametrize("choice", ["model=tiny", "model=naflex_tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trunk_is_a_further_output_of_one_pass(choice: str, dtype: torch.dtype) -> None:
    """Its gradient reaches the trunk; the other outputs are the same, and evaluation is not affected."""
    model = compose(choice).model.build(CPU, dtype)
    tokens_BL, calls = Tokenizer(model.text.context_length)(["a", "a red circle"]), list[object]()
    image = model.image.example(2, CPU).zero_() if choice == "model=tiny" else model.image.example(2, CPU)
    model.eval()
    plain = model(image, tokens_BL)
    model.returns_trunk = True
    hook = model.image.projection.register_forward_hook(lambda *call: calls.append(call))
    image_BD, text_BD, trunk_BW = model(image, tokens_BL)
    hook.remove()
    assert len(calls) == 1
    torch.testing.assert_close((image_BD, text_BD), plain, rtol=0, atol=0)
    torch.testing.assert_close(trunk_BW, model.encode_trunk(image), rtol=0, atol=0)
    torch.testing.assert_close(model.encode_image(image), image_BD, rtol=0, atol=0)
    assert trunk_BW.shape == (2, model.trunk_width) and trunk_BW.dtype is torch.float32
    assert trunk_BW.requires_grad, "the trunk has no gradient"
    trunk_BW.sum().backward()
    assert any(p.grad is not None for p in model.image.trunk.parameters())
    assert all(p.grad is None for p in model.text.parameters())
    assert [len(out) for out in (model(image, tokens_BL), model(image, tokens_BL[:, :0]))] == [3, 3]
