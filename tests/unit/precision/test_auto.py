"""precision=auto: the format that it chooses, on ranks, in plans, and at resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import VIT, small

import clipx.precision.spec
from clipx.precision.spec import AmpBf16Spec, AutoSpec, Fp32Spec
from clipx.trainer.summary import facts
from clipx.trainer.trainer import Trainer

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


def test_a_run_resumes_on_a_device_that_chooses_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part computes in bfloat16, as on a GPU; the change is reported, and the checkpoint fits."""
    path = tmp_path / "run"
    with monkeypatch.context() as gpu:
        gpu.setattr(clipx.precision.spec, "_has_bf16", lambda device: True)
        first = Trainer(small(path, *VIT, "duration=3st"))
        assert first.learner.precision.autocast_dtype is torch.bfloat16
        first.fit()
    second = Trainer(small(path, *VIT, "resume=auto", "duration=4st"))
    assert second.learner.precision.autocast_dtype is None
    assert "precision=auto chooses fp32 on this device, amp_bf16 before" in facts(second)["changed"]
    second.fit()
    third = Trainer(small(path, *VIT, "resume=auto", "duration=5st", "precision=amp_bf16"))
    assert facts(third)["changed"] == "duration: 4st -> 5st; precision.kind: auto -> amp_bf16"
    third.close()
