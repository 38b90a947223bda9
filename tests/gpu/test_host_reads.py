"""Steps between logs never wait for the device, by CUDA's own check of synchronizing calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import needs_cuda
from helpers.runs import VIT, small

from clipx.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.fixture
def forbid_waits() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.ema_decay=0.9", "data.micro_batches=2", "optimizer.clip_norm=1"),
        ("objective=fastclip_v3", "objective.rho=2", "optimizer=lamb", "optimizer.non_finite=skip"),
        ("precision=amp_bf16", "optimizer=sgd", "objective=siglip"),
    ],
    ids=" ".join,
)
def test_steps_do_not_wait_for_the_device(tmp_path: Path, overrides: tuple[str, ...], forbid_waits: None) -> None:
    trainer = Trainer(small(tmp_path / "run", *VIT, "log_every=100st", "duration=8st", *overrides))
    steps = trainer.steps()
    next(steps), next(steps)  # compiles kernels and creates the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    next(steps), next(steps), next(steps)
    torch.cuda.set_sync_debug_mode("default")
    trainer.learner.settle()
    assert trainer.learner.non_finite.total == 0
    trainer.close()
