"""Whole runs on a CUDA device, by each path of a step: small, and compared with the padded, eager float32 run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.runs import VIT, events, losses, rows, small
from torch.distributed.tensor import DTensor

from clipx.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu

COMPILED = ("compile.towers=true", "compile.backend=aot_eager")
INDUCTOR = ("compile.towers=true", "compile.objective=true")
PATHS: dict[str, tuple[tuple[str, ...], float]] = {  # options, and the largest difference of a loss
    "packed": ((), 1e-4),
    "micro-batches": (("data.micro_batches=4",), 1e-4),
    "checkpointing": (("model.image.checkpointing=1", "model.text.checkpointing=1"), 1e-4),
    "selective": (("model.image.checkpointing=selective", "model.text.checkpointing=selective"), 1e-4),
    "tower": (("model.image.checkpointing=tower", "model.text.checkpointing=tower"), 1e-4),
    "tiles": (("objective.tile=8",), 1e-4),
    "captured": (COMPILED, 1e-4),
    "captured selective": ((*COMPILED, "model.image.checkpointing=selective"), 1e-4),
    "generated": (INDUCTOR, 1e-3),
    "generated padded": ((*INDUCTOR, "model.text.packed=false"), 1e-3),
    "amp_bf16": (("precision=amp_bf16",), 0.02),
    "amp_bf16 padded": (("precision=amp_bf16", "model.text.packed=false"), 0.02),
    "amp_bf16 generated": (("precision=amp_bf16", *INDUCTOR), 0.02),
    "amp_bf16 micro-batches": (("precision=amp_bf16", "data.micro_batches=4"), 0.02),
    "bf16 selective": (("precision=bf16", "model.image.checkpointing=selective"), 0.02),
    "amp_fp16 micro-batches": (("precision=amp_fp16", "data.micro_batches=2"), 0.02),
}
CURVES = {  # other losses by design: these must fall
    "ema": ("optimizer.ema_decay=0.9",),
    "muon": ("optimizer=muon", "precision=amp_bf16"),
    "lion": ("optimizer=lion",),
    "lamb": ("optimizer=lamb",),
    "siglip": ("objective=siglip", "precision=amp_bf16"),
    "fastclip_v3": ("objective=fastclip_v3", "objective.rho=2", "precision=amp_bf16"),
    "isogclr": ("objective=isogclr", "objective.rho=2"),
    "captions": ("data.captions_per_step=3", "objective.same_caption=positive", "precision=amp_bf16"),
    "patch dropout": ("model.patch_dropout=0.5", "precision=amp_bf16"),
    "stages": ("stages=[{until:4st,image_size:32},{}]", "precision=amp_bf16"),
    "loader processes": ("data.workers=2", "precision=amp_bf16"),
}


def train(run_dir: Path, device: torch.device, *overrides: str) -> Trainer:
    chosen = (*VIT, f"distributed.device={device.type}", "duration=8st", "checkpoint=none", *overrides)
    trainer = Trainer(small(run_dir, *chosen))
    trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> list[float]:
    """Returns the losses of the padded run in float32, eagerly, in one piece."""
    run_dir = tmp_path_factory.mktemp("expected") / "run"
    train(run_dir, device, "precision=fp32", "model.text.packed=false")
    return losses(run_dir)


@pytest.mark.parametrize("path", PATHS)
def test_each_path_has_the_losses_of_float32(
    path: str, expected: list[float], tmp_path: Path, device: torch.device
) -> None:
    overrides, limit = PATHS[path]
    if device.type == "cpu" and "generated" in path:
        pytest.skip("inductor on the CPU: tests/unit/trainer/test_compile.py")
    train(tmp_path / "run", device, "precision=fp32", *overrides)
    found = losses(tmp_path / "run")
    assert len(found) == len(expected) == 8
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < limit


@pytest.mark.parametrize("path", CURVES)
def test_each_objective_and_optimizer_trains(path: str, tmp_path: Path, device: torch.device) -> None:
    train(tmp_path / "run", device, "schedule.warmup=1st", *CURVES[path])
    found = losses(tmp_path / "run")
    assert len(found) == 8
    assert all(map(math.isfinite, found))


def test_shards_of_one_rank_have_the_losses_of_float32(
    expected: list[float], tmp_path: Path, device: torch.device
) -> None:
    """FSDP2 over a process group of one rank: all code but the exchange between devices."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = train(tmp_path / "run", device, "precision=fp32", "distributed=fsdp")
        assert all(isinstance(p, DTensor) for p in trainer.learner.model.parameters())
    finally:
        dist.destroy_process_group()
    found = losses(tmp_path / "run")
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4


def test_a_default_run_chooses_for_the_device(tmp_path: Path, device: torch.device) -> None:
    trainer = train(tmp_path / "run", device, "evaluator=[zeroshot,retrieval]", "compile.towers=auto")
    line = trainer.run.facts["device"]
    if device.type == "cpu":
        assert line == "cpu; precision=auto chose fp32; compile.towers=auto chose false"
        return
    modern = torch.cuda.is_bf16_supported(including_emulation=False)
    assert line.startswith(torch.cuda.get_device_name(device))
    assert f"precision=auto chose {'amp_bf16' if modern else 'fp32'}" in line
    assert "cudnn.benchmark" in line and "compile.towers=auto chose true" in line
    assert trainer.run.facts["compile"].startswith("4 blocks of the towers, with inductor")
    if "expandable segments" in line:
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    last = rows(tmp_path / "run")[-2]
    assert last["train/device_memory_gb"] > 0


def test_a_profile_has_the_time_of_kernels(tmp_path: Path, device: torch.device) -> None:
    train(tmp_path / "run", device, "profiler.steps=[3,5]")
    (found,) = [event for event in events(tmp_path / "run") if event["event"] == "profile"]
    assert found["steps"] == 3
    assert found["step_ms"] > 0
    assert device.type == "cpu" or found["computation_ms"] > 0
    assert list((tmp_path / "run" / "profile").iterdir())
