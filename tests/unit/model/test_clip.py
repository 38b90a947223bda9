"""The CLIP model: parameter counts of the published architectures, and features against open_clip."""

from __future__ import annotations

import re
from functools import cache

import open_clip.model  # type: ignore[import-untyped]
import pytest
import torch
import torch.nn.functional as F
from helpers.cases import slow_except
from helpers.runs import compose
from torch import Tensor
from transformers import Siglip2Config

from clipx.config.registry import CONF_DIR
from clipx.model.clip import CLIP, parameter_count
from clipx.model.spec import ClipSpec
from clipx.model.text_spec import ClipTextSpec
from clipx.model.tokenizer import Tokenizer
from clipx.model.tower_spec import ImageTowerSpec
from clipx.weights import siglip2

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


@cache
def composed(name: str) -> ClipSpec:
    """Returns the spec of `model=<name>`."""
    spec = compose(f"model={name}").model
    assert isinstance(spec, ClipSpec)
    assert spec.name == name
    return spec


@cache
def published(name: str) -> CLIP:
    return composed(name).build(META, torch.float32)


def small_spec(quick_gelu: bool = False) -> ClipSpec:
    options = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    return ClipSpec(
        name="small",
        embed_dim=48,
        quick_gelu=quick_gelu,
        image=ImageTowerSpec(timm="vit_base_patch16_clip_224", size=32, options=options),
        text=ClipTextSpec(context_length=12, width=64, heads=2, layers=3),
    )


def build(seed: int = 0, dtype: torch.dtype = torch.float32) -> CLIP:
    torch.manual_seed(seed)
    return small_spec().build(CPU, dtype).eval()


@pytest.fixture(scope="module")
def small() -> CLIP:
    return build()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return Tokenizer(context_length=12)(["a photo of a cat", "two dogs", ""])


# ----------------------------------------------------------------------------------------- published architectures


@pytest.mark.parametrize("name", slow_except([*PUBLISHED, *UNPUBLISHED], "rn50", "vit_b32", "vit_b16_siglip", "tiny"))
def test_an_architecture_has_the_counts_that_are_published_and_in_its_yaml(name: str) -> None:
    model, spec = published(name), composed(name)
    counts = parameter_count(model) + 1, parameter_count(model.image), len(model.state_dict()) + 1
    assert counts == PUBLISHED.get(name, counts)
    assert all(parameter.is_meta for parameter in model.parameters())
    title = (CONF_DIR / "model" / f"{name}.yaml").read_text().splitlines()[0]
    stated = [int(n.replace(",", "")) for n in re.findall(r"\d+(?:,\d{3})+", title)]
    assert stated == [parameter_count(model), parameter_count(model.image)]
    if spec.kind == "clip" and not spec.image.native:
        image = torch.empty(2, 3, spec.image.size, spec.image.size, dtype=torch.uint8, device=META)
        tokens = torch.empty(2, spec.text.context_length, dtype=torch.int64, device=META)
        assert [x.shape for x in model(image, tokens)] == [(2, spec.embed_dim)] * 2


def test_the_so400m_model_of_siglip_2_is_that_of_timm() -> None:
    size = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    config = Siglip2Config(vision_config=size, text_config={**size, "vocab_size": 256_000}).to_dict()
    spec = siglip2.spec_of(config, "so400m", "tokenizer.json")
    assert spec.image.timm == "naflexvit_so400m_patch16_siglip" and not spec.image.options
    model = spec.build(META, torch.float32)
    assert model.image.trunk.blocks[0].mlp.fc1.out_features == model.text.blocks[0].mlp.fc1.out_features == 4304


# ----------------------------------------------------------------------------------------------- against open_clip


def open_clip_twin(spec: ClipSpec) -> torch.nn.Module:
    """Builds the same model in open_clip, with noise added to every parameter, including norms and biases."""
    torch.manual_seed(1)
    options, text = spec.image.options, spec.text
    vision_cfg = open_clip.model.CLIPVisionCfg(
        layers=options["depth"],
        width=options["embed_dim"],
        head_width=options["embed_dim"] // options["num_heads"],
        patch_size=options["patch_size"],
        image_size=spec.image.size,
    )
    text_cfg = open_clip.model.CLIPTextCfg(
        context_length=text.context_length, width=text.width, heads=text.heads, layers=text.layers
    )
    twin: torch.nn.Module = open_clip.model.CLIP(spec.embed_dim, vision_cfg, text_cfg, quick_gelu=spec.quick_gelu)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return twin.eval()


RENAMED = [
    (r"^(?!visual\.)", "text."),
    (r"^visual\.", "image.trunk."),
    (r"^text\.text_projection$", "text.projection.weight"),
    (r"^image\.trunk\.proj$", "image.projection.weight"),
    (r"transformer\.resblocks\.", "blocks."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.ln_(1|2)\.", r".norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.(ln_final|ln_post)\.", ".norm."),
    (r"\.ln_pre\.", ".norm_pre."),
    (r"\.conv1\.", ".patch_embed.proj."),
    (r"^image\.trunk\.class_embedding$", "image.trunk.cls_token"),
    (r"^image\.trunk\.positional_embedding$", "image.trunk.pos_embed"),
]


def from_open_clip(twin: torch.nn.Module, model: CLIP) -> dict[str, Tensor]:
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    renamed = {}
    for name, value in twin.state_dict().items():
        for pattern, new in RENAMED:
            name = re.sub(pattern, new, name)
        value = value.T if name.endswith("projection.weight") else value
        if name != "text.logit_scale":
            renamed[name] = value.reshape(shapes[name]) if name.startswith("image.") else value
    return renamed


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_features_equal_those_of_open_clip(quick_gelu: bool, images: Tensor, tokens: Tensor) -> None:
    spec = small_spec(quick_gelu)
    model, twin = spec.build(CPU, torch.float32).eval(), open_clip_twin(spec)
    model.load_state_dict(from_open_clip(twin, model))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in spec.image.normalization.values())
    pixels = (images / 255 - mean) / std
    with torch.no_grad():
        torch.testing.assert_close(model.image(pixels), twin.encode_image(pixels), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.text(tokens), twin.encode_text(tokens), rtol=1e-5, atol=1e-5)
        expected = twin.encode_image(pixels, normalize=True), twin.encode_text(tokens, normalize=True)
        torch.testing.assert_close(model(images, tokens), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- embeddings


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
    weights: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype, images: Tensor, tokens: Tensor
) -> None:
    model = build(dtype=weights)
    with torch.no_grad(), torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        for embedding_BD in model(images, tokens):
            assert embedding_BD.dtype == expected
            torch.testing.assert_close(embedding_BD.norm(dim=-1), torch.ones(3, dtype=expected))


def test_autocast_changes_embeddings_only_by_rounding(small: CLIP, images: Tensor, tokens: Tensor) -> None:
    with torch.no_grad():
        exact = small(images, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = small(images, tokens)
    for a_BD, b_BD in zip(exact, rounded, strict=True):
        assert not torch.equal(a_BD, b_BD)
        assert (a_BD * b_BD).sum(dim=-1).min() > 0.999


def test_uint8_and_float_images_give_equal_embeddings(small: CLIP, images: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(small.encode_image(images), small.encode_image(images / 255))


def test_pixels_are_normalised_by_the_mean_and_std_of_the_spec(small: CLIP, images: Tensor) -> None:
    mean, std = ([[[v]] for v in values] for values in (ImageTowerSpec(timm="").mean, ImageTowerSpec(timm="").std))
    with torch.no_grad():
        expected = F.normalize(small.image((images / 255 - torch.tensor(mean)) / torch.tensor(std)), dim=-1)
        torch.testing.assert_close(small.encode_image(images), expected)


def test_forward_equals_both_encoders(small: CLIP, images: Tensor, tokens: Tensor) -> None:
    with torch.no_grad():
        expected = small.encode_image(images), small.encode_text(tokens)
        torch.testing.assert_close(small(images, tokens), expected)


def test_every_parameter_gets_a_gradient(images: Tensor, tokens: Tensor) -> None:
    model = build()
    image_BD, text_BD = model(images, tokens)
    (image_BD @ text_BD.T).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


# -------------------------------------------------------------------------------------------------------- errors


INTEGERS = torch.zeros(2, 3, 32, 32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("side", "given", "message"),
    [
        *(
            ("image", torch.zeros(shape), f"{list(shape)}, must be [B, 3, 32, 32]")
            for shape in ((2, 3, 48, 48), (2, 1, 32, 32), (3, 32, 32), (2, 32, 32, 3))
        ),
        *(
            ("text", torch.zeros(shape, dtype=torch.int64), f"{list(shape)}, must be [B, 12]")
            for shape in ((2, 77), (2, 11), (12,))
        ),
        ("image", INTEGERS, "torch.int64, must be uint8, or floating point in [0, 1]"),
    ],
)
def test_inputs_of_another_shape_or_type_raise_an_error(small: CLIP, side: str, given: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(small, f"encode_{side}")(given)


# --------------------------------------------------------------------------------------------------------- state


def test_one_seed_gives_the_same_weights_in_any_dtype(small: CLIP) -> None:
    same, other, double = build(0).state_dict(), build(1).state_dict(), build(0, torch.float64).state_dict()
    for name, value in small.state_dict().items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, double[name].float())
    assert not torch.equal(small.state_dict()["image.trunk.pos_embed"], other["image.trunk.pos_embed"])
    assert set(small.state_dict()) == {name for name, _ in small.named_parameters()}


def test_every_weight_is_initialized() -> None:
    """Fills new memory with NaN before the build, so that an uninitialized weight is detected."""
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert all(p.isfinite().all() for p in build().parameters())
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_deterministic)


@pytest.mark.parametrize(
    ("name", "positions", "class_tokens"),
    [
        ("rn50", {"image.trunk.head.pos_embed", "text.positional_embedding"}, set()),
        ("vit_b32", {"image.trunk.pos_embed", "text.positional_embedding"}, {"image.trunk.cls_token"}),
        ("convnext_base_w", {"text.positional_embedding"}, set()),
    ],
)
def test_names_of_positional_embeddings_and_class_tokens(
    name: str, positions: set[str], class_tokens: set[str]
) -> None:
    model = published(name)
    assert model.positional_embeddings() == positions
    assert model.class_tokens() == class_tokens
    assert positions | class_tokens <= {n for n, _ in model.named_parameters()}
