"""Sharded runs beyond the run matrix: another number of processes, hybrid shards, gradients in 16 bits."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from helpers.float64_runs import trained
from helpers.ranks import Ranks
from helpers.runs import VIT

SIX = (*VIT, "duration=6st", "data.samples=192", "evaluator=[retrieval]", "evaluator.retrieval.every=3st")
FSDP, MUON, UNSAVED = "distributed=fsdp", "optimizer=muon", "checkpoint=none"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_sharded_run_resumes_in_a_single_process(two_ranks: Ranks, tmp_path: Path) -> None:
    words = (*SIX, "checkpoint.every=3st")
    two_ranks.call(trained, tmp_path / "run", *words, FSDP)
    found = trained(tmp_path / "run", *words, "resume=step:3")
    assert_same(found, trained(tmp_path / "alone", *SIX, UNSAVED))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shards"),
    [((MUON,), ("distributed.shard_size=2",)), (("objective=fastclip_v3", "objective.rho=2.9"), ())],
)
def test_hybrid_sharding_matches_a_single_process(
    words: tuple[str, ...], shards: tuple[str, ...], tmp_path: Path
) -> None:
    with contextlib.closing(Ranks(4, tmp_path)) as ranks:
        found = ranks.call(trained, tmp_path / "ranks", *SIX, UNSAVED, *words, FSDP, *shards)
    assert_same(found[0], trained(tmp_path / "alone", *SIX, UNSAVED, *words))
