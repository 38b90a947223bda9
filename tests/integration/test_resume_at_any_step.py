"""Runs resume from any step bit for bit. The run matrix resumes every feature from one step, on two ranks."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.ranks import Ranks
from helpers.runs import VIT, small, tensors, untimed_rows

from clipx.checkpoint.format import CheckpointDir
from clipx.trainer.trainer import Trainer

STEPS = 5
# Five steps of 36 in epochs of 75 samples: samples return, γ falls, and steps 2 and 4 are in the middle of an epoch.
# Dropout draws random numbers, in two micro-batches.
FIVE = (
    *(*VIT, "+model.image.options.proj_drop_rate=0.1", "data.samples=75", "data.batch_size=36", "data.micro_batches=2"),
    *(f"duration={STEPS}st", "checkpoint.every=1st", "checkpoint.keep_last=9"),
    *("evaluator=[retrieval]", "evaluator.retrieval.every=2st"),
)
OBJECTIVES = {
    "fastclip_v3": ("objective.rho=2",),
    "neuclip": ("objective.prototypes=50", "objective.updates=2", "objective.restart=3st", "objective.rho=2"),
    "siglip": ("objective.same_caption=mask", "data.captions_per_step=3", "data.sub_captions=2"),
}


@pytest.mark.parametrize("objective", slow_except(OBJECTIVES, "fastclip_v3"))
def test_a_run_resumes_from_every_step_bit_for_bit(tmp_path: Path, objective: str) -> None:
    assert differences(tmp_path, f"objective={objective}", *OBJECTIVES[objective]) == []


def test_a_run_with_loader_workers_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert differences(tmp_path, "data.workers=2", steps=range(3, 5)) == []


@pytest.mark.parametrize("objective", slow_except(["fastclip_v3", "isogclr"], "fastclip_v3"))
def test_a_run_resumes_on_another_number_of_ranks(objective: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """A step each on 2 and 3 ranks, and three on one, equal five on one: rows, weights and every sample's state."""
    words = (*FIVE, f"objective={objective}", "objective.rho=2", "precision=fp64")
    words = (*(word for word in words if "drop_rate" not in word), "data.micro_batches=1")
    train(straight := tmp_path / "straight", *words)
    two_ranks.call(train, elastic := tmp_path / "elastic", *words)
    with contextlib.closing(Ranks(3, tmp_path)) as three:
        three.call(train, elastic, *words, "resume=step:1")
    train(elastic, *words, "resume=step:2")
    expected, found = tensors(straight, STEPS), tensors(elastic, STEPS)
    saved = CheckpointDir(elastic / "checkpoints", print).load(STEPS)
    assert saved is not None and saved.sharded_names(), "the checkpoint has no rows of samples"
    for name in (name for name in expected if not name.startswith("rng")):
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=1e-7, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    for own, other in zip(untimed_rows(elastic), untimed_rows(straight), strict=True):
        assert own == pytest.approx(other, rel=1e-9, abs=1e-9)


def train(run_dir: Path, *words: str) -> None:
    Trainer(small(run_dir, *words)).fit()


def differences(folder: Path, *overrides: str, steps: range = range(1, STEPS)) -> list[str]:
    """Returns by step the differences from the run that never stopped."""
    straight = folder / "straight"
    train(straight, *FIVE, *overrides)
    expected, expected_rows = tensors(straight, STEPS), untimed_rows(straight)
    found = []
    for step in steps:
        run_dir = folder / f"from-{step}"
        shutil.copytree(straight, run_dir)
        again = Trainer(small(run_dir, *FIVE, *overrides, f"resume=step:{step}"))
        assert again.steps_done == step
        again.fit()
        ended = tensors(run_dir, STEPS)
        assert ended.keys() == expected.keys()
        found += [f"{step}: {name}" for name in expected if not torch.equal(ended[name], expected[name])]
        found += [f"{step}: metrics.jsonl"] if untimed_rows(run_dir) != expected_rows else []
    return found
