"""Number formats: what the weights, the towers' products and the embeddings are in each of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipx.config import compose
from clipx.errors import ConfigError
from clipx.model.clip import CLIP
from clipx.precision import AmpBf16Spec, Fp32Spec, Fp64Spec, Precision, PrecisionSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tf32_restored():  # type: ignore[no-untyped-def]
    saved = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = saved


def embedded(precision: Precision) -> tuple[CLIP, Tensor, Tensor]:
    torch.manual_seed(0)
    model = compose().model.build(CPU, precision.dtype)
    image = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8)
    tokens = torch.randint(1, 400, (4, 20))
    with precision.autocast():
        image_BD, text_BD = model(image, tokens)
    return model, image_BD, text_BD


@pytest.mark.parametrize(
    ("spec", "weights", "product", "embeddings"),
    [
        (Fp32Spec(), torch.float32, torch.float32, torch.float32),
        (AmpBf16Spec(), torch.float32, torch.bfloat16, torch.float32),
        (Fp64Spec(), torch.float64, torch.float64, torch.float64),
    ],
    ids=["fp32", "amp_bf16", "fp64"],
)
def test_weights_products_and_embeddings_have_the_stated_types(
    spec: PrecisionSpec, weights: torch.dtype, product: torch.dtype, embeddings: torch.dtype
) -> None:
    precision = spec.build(CPU)
    model, image_BD, text_BD = embedded(precision)
    assert {p.dtype for p in model.parameters()} == {weights} == {precision.dtype}
    a = torch.ones(2, 2, dtype=weights)
    with precision.autocast():
        assert (a @ a).dtype == product
    assert (a @ a).dtype == weights  # not outside
    assert image_BD.dtype == text_BD.dtype == embeddings
    norms = torch.cat([image_BD, text_BD]).norm(dim=1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-12 if embeddings == torch.float64 else 1e-6)


@pytest.mark.parametrize(("spec", "least", "most"), [(Fp32Spec(), 0, 1e-5), (AmpBf16Spec(), 1e-5, 0.1)])
def test_formats_differ_from_float64_by_their_own_rounding(spec: PrecisionSpec, least: float, most: float) -> None:
    _, exact, _ = embedded(Fp64Spec().build(CPU))
    _, image_BD, _ = embedded(spec.build(CPU))
    error = (image_BD.double() - exact).abs().max().item()
    assert least < error < most


def test_tf32_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"^precision\.tf32=true has no effect on cpu: set it to false, or train on"):
        Fp32Spec(tf32=True).build(CPU)


def test_fp32_switches_tf32_off() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    Fp32Spec().build(CPU)
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert torch.backends.cudnn.allow_tf32 is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_rounds_products_on_the_gpu_only_when_asked(tf32: bool) -> None:
    Fp32Spec(tf32=tf32).build(torch.device("cuda"))
    a = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    error = ((a @ a).double() - a.double() @ a.double()).abs().max().item()
    assert (error > 1e-3) is tf32
