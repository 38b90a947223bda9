"""Towers on packed sequences, by variable-length attention and by a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clipx.model.varlen import is_supported


def assert_packed_equals_masked(
    tower: nn.Module,
    inputs: Any,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    modules: tuple[str, ...] = ("clipx.model.packing",),
) -> None:
    """Compares features and gradients. The reference is float32 with a mask; the error of both forms in bfloat16 is of
    the same size. `modules`: those that ask whether variable-length attention is supported."""
    found = {}
    for name, masked, autocast in (("exact", True, False), ("usual", True, True), ("packed", False, True)):
        for module in modules:
            monkeypatch.setattr(f"{module}.is_supported", (lambda *_: False) if masked else is_supported)
        tower.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            features_BD = tower(inputs)
        features_BD.float().square().sum().backward()
        gradients = {key: p.grad.clone() for key, p in tower.named_parameters() if p.grad is not None}
        found[name] = {"features": features_BD.detach().float(), **gradients}
    assert len(found["exact"]) > 20
    for key, exact in found["exact"].items():
        error, usual = ((found[name][key] - exact).norm() / exact.norm() for name in ("packed", "usual"))
        assert error < 1.5 * usual + 1e-3, key
