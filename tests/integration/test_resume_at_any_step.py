"""Runs resume from any step bit for bit: every objective, micro-batches, workers, one rank and two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.runs import VIT, small, torchrun
from helpers.scripts.resume_each_step import OBJECTIVES, differences, options

from clipx.trainer.trainer import Trainer


# The other objectives combine the same parts differently, or have no state.
@pytest.mark.parametrize("objective", slow_except(OBJECTIVES, "fastclip_v3", "captions"))
def test_a_run_resumes_from_every_step_bit_for_bit(tmp_path: Path, objective: str) -> None:
    assert differences(tmp_path, *options(objective)) == []


def test_a_run_with_loader_workers_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert differences(tmp_path, *options("fastclip_v3"), "data.workers=2", steps=range(3, 5)) == []


AUGMENTED = (
    "data.crop_ratio=[0.5,2]",
    "data.augment={flip:0.5,rand_augment:{operations:2},color_jitter:{probability:0.8},grayscale:0.2,erase:0.5}",
    "data.caption_mask={rule:random,share:0.6}",
)


@pytest.mark.parametrize("workers", slow_except([0, 2], 2))
def test_a_run_with_augmentation_resumes_bit_for_bit(tmp_path: Path, workers: int) -> None:
    assert differences(tmp_path, *options("infonce"), *AUGMENTED, f"data.workers={workers}", steps=range(2, 4)) == []


@pytest.mark.parametrize(
    "objective", slow_except(["fastclip_v3", "infonce", "isogclr", "neuclip", "captions"], "fastclip_v3")
)
def test_a_run_on_two_ranks_resumes_bit_for_bit(tmp_path: Path, objective: str) -> None:
    torchrun(2, str(SCRIPTS / "resume_each_step.py"), str(tmp_path), objective)
    for rank in range(2):
        assert json.loads((tmp_path / f"differences.{rank}.json").read_text()) == {objective: []}


@pytest.mark.parametrize("dora", slow_except(["false", "true"], "true"))
def test_a_run_with_adapters_resumes_bit_for_bit(tmp_path: Path, dora: str) -> None:
    """Dropout of the adapters, in two micro-batches, and the average of the weights."""
    Trainer(small(tmp_path / "zero", *VIT, "duration=1st", "schedule.warmup=0st")).fit()
    adapters = [f"model.{side}.lora.{word}" for side in ("image", "text") for word in ("rank=3", "dropout=0.2")]
    adapters += [f"model.image.lora.dora={dora}", f"model.weights={tmp_path / 'zero'}", "optimizer.ema_decay=0.9"]
    assert differences(tmp_path, *options("infonce"), *adapters, steps=range(2, 5)) == []
