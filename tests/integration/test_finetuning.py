"""Locked towers and a classification head: several ranks and micro-batches match a single process."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import SCRIPTS
from helpers.runs import VIT, small, torchrun
from helpers.scripts.fsdp_training import trained
from safetensors.torch import load_file

from clipx.trainer.trainer import Trainer

SCRIPT = str(SCRIPTS / "finetune.py")
NARROW = (*VIT, "model.embed_dim=16", "model.text.width=16", "model.text.heads=2")
EVALUATED = ("checkpoint=none", "evaluator=[retrieval]", "evaluator.retrieval.every=end")
KINDS = {
    "part": ("model.image.lock=2", "model.text.lock=all", "optimizer.layer_decay=0.5"),
    "norms": ("model.image.lock=1", "model.image.lock_norms=false", "model.text.lock=0", "model.text.lock_norms=false"),
    "head": ("objective=classification", "model.text.lock=all", "objective.label_smoothing=0.1"),
    "probe": ("objective=classification", "model.text.lock=all", "model.image.lock=all"),
}
FSDP, MICRO = "distributed=fsdp", "data.micro_batches=2"
WAYS = {
    "part_ddp": ("part", MICRO),
    "part_fsdp": ("part", FSDP, MICRO),
    "norms_fsdp": ("norms", FSDP),
    "head_ddp": ("head", MICRO),
    "head_fsdp": ("head", FSDP, MICRO),
    "probe_ddp": ("probe", MICRO),
    "sent": ("part",),
}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("zero") / "run"
    Trainer(small(run_dir, *NARROW, "duration=2st", "schedule.warmup=1st")).fit()
    return f"model.weights={run_dir}"


@pytest.fixture(scope="module")
def single(weights: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    """Trains in one process with the whole batch at once."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: trained(folder / name, [*NARROW, *EVALUATED, weights, *words]) for name, words in KINDS.items()}


@pytest.fixture(scope="module")
def two(weights: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    folder = tmp_path_factory.mktemp("two")
    ways = {name: [*NARROW, *EVALUATED, weights, *KINDS[kind], *words] for name, (kind, *words) in WAYS.items()}
    torchrun(2, SCRIPT, str(folder), *(f"{name}={json.dumps(words)}" for name, words in ways.items()))
    return {name: load_file(folder / f"{name}.safetensors") for name in ways}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "sent"])
def test_two_ranks_match_a_single_process(way: str, two: dict[str, Tensors], single: dict[str, Tensors]) -> None:
    """Losses, gradient norms, weights, their average, the head and evaluation results: float64, to 1e-9."""
    expected = single[WAYS[way][0]]
    assert len(expected["train/loss"]) == 4
    assert two[way].keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(two[way][name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_locked_parameters_are_not_sent(two: dict[str, Tensors]) -> None:
    sent, learning, whole = two["sent"]["bytes"].tolist()
    assert sent == learning < whole / 4
