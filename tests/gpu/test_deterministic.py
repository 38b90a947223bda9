"""deterministic=true: a run repeats itself, and resumes, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs import VIT, small, tensors, untimed_rows

from clipx.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu

# 144 patches: more than one block of keys, so that flash attention sums the gradient of its queries over several.
LONG = ("model.image.size=96", "model.image.options.patch_size=8", "model.image.options.drop_path_rate=0.1")
PATHS = {
    "packed": (),
    "padded": ("model.text.packed=false",),
    "fp32": ("precision=fp32",),
    "compiled": ("compile.towers=true",),
    "micro-batches": ("data.micro_batches=2", "model.image.checkpointing=1"),
    "per-sample state": ("objective=fastclip_v3", "objective.rho=2"),
    "convolutions": ("model=tiny",),
}


def trainer(run_dir: Path, device: torch.device, *overrides: str) -> Trainer:
    own = () if "model=tiny" in overrides else (*VIT, *LONG)
    fixed = ("deterministic=true", f"distributed.device={device.type}", "checkpoint.every=4st", "duration=8st")
    return Trainer(small(run_dir, *own, *fixed, *overrides))


@pytest.mark.parametrize("path", PATHS)
def test_a_run_repeats_and_resumes_bit_for_bit(path: str, tmp_path: Path, device: torch.device) -> None:
    if device.type == "cpu" and path == "compiled":
        pytest.skip("inductor on the CPU: tests/unit/trainer/test_compile.py")
    for name in ("one", "again"):
        trainer(tmp_path / name, device, *PATHS[path]).fit()
    shutil.copytree(tmp_path / "one", tmp_path / "resumed")
    resumed = trainer(tmp_path / "resumed", device, *PATHS[path], "resume=step:4")
    assert resumed.steps_done == 4
    resumed.fit()
    expected = tensors(tmp_path / "one", 8)
    for name in ("again", "resumed"):
        found = tensors(tmp_path / name, 8)
        different = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
        assert different == [], name
    assert untimed_rows(tmp_path / "again") == untimed_rows(tmp_path / "one")
    assert untimed_rows(tmp_path / "resumed")[-4:] == untimed_rows(tmp_path / "one")[-4:]
