"""Objectives with per-sample state resume on any number of ranks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.runs import SMALL, VIT, losses, run, small, tensors, torchrun

from clipx.checkpoint.format import CheckpointDir
from clipx.errors import CheckpointError
from clipx.trainer.trainer import Trainer

# Three epochs of 75 samples in six steps of 36, so that samples return and γ falls; ρ is below log(75 - 1).
SIX = (*VIT, "data.samples=75", "data.batch_size=36", "duration=6st", "checkpoint.every=1st", "checkpoint.keep_last=9")


def options(objective: str) -> tuple[str, ...]:
    rho = ("objective.rho=2",) if objective in ("isogclr", "fastclip_v2", "fastclip_v3") else ()
    return (*SIX, f"objective={objective}", *rho)


@pytest.mark.parametrize("objective", ["fastclip_v3", pytest.param("isogclr", marks=pytest.mark.slow)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, objective: str) -> None:
    """Two steps each on 2, 3 and 1 ranks equal six on one rank: samples, losses, weights and every sample's state."""
    command = ["-m", "clipx.train", *SMALL, *options(objective), "precision=fp64"]
    straight, elastic = tmp_path / "straight", tmp_path / "elastic"
    run(sys.executable, *command, f"run_dir={straight}")
    for ranks, kept in ((2, 2), (3, 4), (1, 6)):
        torchrun(ranks, *command, f"run_dir={elastic}", "resume=auto")
        for step in range(kept + 1, 7):
            shutil.rmtree(elastic / "checkpoints" / f"step-{step:08d}")
    assert losses(elastic) == pytest.approx(losses(straight), abs=1e-9)
    expected, found = tensors(straight, 6), tensors(elastic, 6)
    saved = CheckpointDir(elastic / "checkpoints", print).load(6)
    assert saved is not None and saved.sharded_names(), "the checkpoint has no rows of samples"
    for name in (name for name in expected if not name.startswith("rng")):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_a_checkpoint_of_another_objective_is_rejected(tmp_path: Path) -> None:
    Trainer(small(tmp_path / "run", *options("fastclip_v1"))).fit()
    spec = small(tmp_path / "run", *options("fastclip_v1"), "resume=auto")
    other = small(tmp_path / "run", *SIX, "objective=dcl")
    spec.objective = other.objective
    with pytest.raises(CheckpointError):
        Trainer(spec)
