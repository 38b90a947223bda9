"""precision=auto: the format that it chooses, on ranks, in plans, and at resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import PLUGINS
from helpers.runs import SMALL, VIT, compose, small, tensors, torchrun, untimed_rows

import clipx.precision.spec
from clipx.plan.spec import PlanSpec
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


def test_the_cpu_computes_in_float32_bit_for_bit_as_fp32(tmp_path: Path) -> None:
    assert AutoSpec().on(CPU) == Fp32Spec()
    for name, option in (("auto", ()), ("fp32", ("precision=fp32",))):
        trainer = Trainer(small(tmp_path / name, *VIT, "checkpoint.every=end", *option))
        assert trainer.spec.precision.kind == name
        trainer.fit()
    assert untimed_rows(tmp_path / "auto") == untimed_rows(tmp_path / "fp32")
    saved, expected = tensors(tmp_path / "auto", 4), tensors(tmp_path / "fp32", 4)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_another_explicit_format_is_that_format_on_any_device() -> None:
    spec = compose("precision=fp32")
    assert spec.precision.on(CPU) is spec.precision is spec.precision.resolve(bf16=True)


def test_a_plan_assumes_bfloat16() -> None:
    spec = compose("model=vit_b32", config_name="plan")
    assert isinstance(spec, PlanSpec)
    assert spec.precision == AmpBf16Spec()
    assert compose("model=vit_b32", "precision=fp32", config_name="plan").precision == Fp32Spec()


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


def test_ranks_whose_devices_choose_different_formats_are_rejected(tmp_path: Path) -> None:
    words = (*SMALL, f"run_dir={tmp_path / 'run'}", "name=run", "precision=by_rank")
    done = torchrun(2, "-m", "clipx.train", "--config-dir", str(PLUGINS / "mixed"), *words, check=False)
    assert done.returncode != 0
    assert "has precision=amp_bf16, rank 0 (host " in done.stderr
