"""The Triton kernels of the loss: results in Triton's interpreter, code for two generations of devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cases import slow_except
from helpers.runs import torchrun
from helpers.scripts import fused_loss

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("ranks", slow_except([1, 3], 1))
def test_the_kernels_match_dense_losses_on_any_number_of_ranks(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, several blocks and tiles, tiles of other ranks' samples; InfoNCE, DCL and a moving average.

    The gradient of the scale is a small difference of large sums.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torchrun(ranks, fused_loss.__file__, str(tmp_path / "errors"))
    errors = json.loads((tmp_path / "errors").read_text())
    assert errors.pop("a tile off the diagonal")["lse"] < 1e-4
    assert len(errors) == 3 * len(fused_loss.CASES)
    for case, found in errors.items():
        assert found["loss"] < 1e-5, case
        assert max(found["image"], found["text"]) < 5e-4, case
        assert found["scale"] < 5e-3, case


@pytest.mark.parametrize("capability", slow_except([80, 90], 80))
@pytest.mark.parametrize("name", ["_lse", "_softmax"])
def test_the_kernels_compile_for_devices_that_are_not_here(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A block of both needs less shared memory than the 99 KiB that every device from 8.0 has."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from clipx.objective.losses import fused

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"x": "*fp16", "y": "*fp16", "rows": "i32", "cols": "i32", "diagonal": "i32"}
    kernel = getattr(fused, name)
    constants = {"K": 1536, "BLOCK": fused._BLOCK, "BLOCK_K": fused._BLOCK_K}
    signature = {key: "constexpr" if key in constants else types.get(key, "*fp32") for key in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    launch = {key: value for key, value in fused._LAUNCH.items() if key not in constants}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    assert compiled.metadata.shared <= 99 * 1024
    assert ("wgmma" if capability == 90 else "mma.sync") in compiled.asm["ptx"], "no tensor cores"
