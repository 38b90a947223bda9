"""Number formats on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import needs_cuda
from helpers.runs import step_losses

from clipx.precision.spec import Fp32Spec

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_rounds_products_only_if_enabled(tf32: bool) -> None:
    Fp32Spec(tf32=tf32).build(torch.device("cuda"))
    a = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    error = ((a @ a).double() - a.double() @ a.double()).abs().max().item()
    assert (error > 1e-3) is tf32


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses in float32."""
    return step_losses(tmp_path_factory.mktemp("curve") / "run")


@pytest.mark.parametrize("precision", ["amp_fp16", "bf16", "fp16", "float8", "int8"])
def test_loss_curves_stay_close_to_float32(precision: str, curve: list[float], tmp_path: Path) -> None:
    narrow = ["precision.min_width=16"] if precision in ("float8", "int8") else []
    found = step_losses(tmp_path / "run", f"precision={precision}", *narrow)
    assert max(abs(a - b) for a, b in zip(found, curve, strict=True)) < 0.05
