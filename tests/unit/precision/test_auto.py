"""precision=auto: the format that it chooses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from clipx.precision.spec import AmpBf16Spec, AutoSpec, Fp32Spec

CPU = torch.device("cpu")


@pytest.mark.parametrize(("major", "chosen"), [(9, AmpBf16Spec()), (8, AmpBf16Spec()), (7, Fp32Spec())])
def test_cuda_devices_from_compute_capability_8_compute_in_bfloat16(
    major: int, chosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device itself is a stand-in; torch decides by the properties that it reports."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert AutoSpec().on(torch.device("cuda")) == chosen
    assert AutoSpec().on(CPU) == Fp32Spec()
