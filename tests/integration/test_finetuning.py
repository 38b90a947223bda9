"""Locked towers, adapters and a classification head: several ranks and micro-batches match a single process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import torch
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.runs import VIT, small, torchrun
from helpers.scripts.fsdp_training import trained
from safetensors.torch import load_file

from clipx.trainer.trainer import Trainer

SCRIPT = str(SCRIPTS / "finetune.py")
NARROW = (*VIT, "model.embed_dim=16", "model.text.width=16", "model.text.heads=2")
EVALUATED = ("checkpoint=none", "evaluator=[retrieval]", "evaluator.retrieval.every=end")
DORA = ("model.image.lora.dora=true", "model.text.lora.dora=true")
KINDS = {
    "part": ("model.image.lock=2", "model.text.lock=all", "optimizer.layer_decay=0.5"),
    "norms": ("model.image.lock=1", "model.image.lock_norms=false", "model.text.lock=0", "model.text.lock_norms=false"),
    "head": ("objective=classification", "model.text.lock=all", "objective.label_smoothing=0.1"),
    "lora": (
        "model.image.lora.rank=3",
        "model.text.lora.rank=2",
        "model.text.lora.last=1",
        "optimizer.layer_decay=0.5",
    ),
    # One row of A on two ranks: the shard of the second is empty.
    "dora": (*DORA, "model.image.lora.rank=1", "model.text.lora.rank=5", "model.text.lora.layers=[attn.*,mlp.fc1]"),
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
    "lora_ddp": ("lora", MICRO),
    "lora_fsdp": ("lora", FSDP, MICRO),
    "dora_ddp": ("dora",),
    "dora_fsdp": ("dora", FSDP, MICRO),
    "sent": ("part",),
}
QUICK = ("part_ddp", "head_fsdp", "dora_fsdp", "sent")
Tensors = dict[str, torch.Tensor]
Results = Callable[[str], Tensors]  # of a kind of fine-tuning, or of a way to train on two ranks


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("zero") / "run"
    Trainer(small(run_dir, *NARROW, "duration=2st", "schedule.warmup=1st")).fit()
    return f"model.weights={run_dir}"


@pytest.fixture(scope="module")
def single(weights: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Trains in one process with the whole batch at once, once for each kind."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda kind: trained(folder / kind, [*NARROW, *EVALUATED, weights, *KINDS[kind]]))


@pytest.fixture(scope="module")
def two(weights: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Trains on two ranks, all quick ways or all others in one launch."""
    folder = tmp_path_factory.mktemp("two")

    @functools.cache
    def found(quick: bool) -> dict[str, Tensors]:
        ways = {
            way: json.dumps([*NARROW, *EVALUATED, weights, *KINDS[kind], *words])
            for way, (kind, *words) in WAYS.items()
            if (way in QUICK) == quick
        }
        torchrun(2, SCRIPT, str(folder), *(f"{way}={words}" for way, words in ways.items()))
        return {way: load_file(folder / f"{way}.safetensors") for way in ways}

    return lambda way: found(way in QUICK)[way]


@pytest.mark.parametrize(
    "way", slow_except([way for way in WAYS if way != "sent"], "part_ddp", "head_fsdp", "dora_fsdp")
)
def test_two_ranks_match_a_single_process(way: str, two: Results, single: Results) -> None:
    """Losses, gradient norms, weights, their average, the head and evaluation results: float64, to 1e-9."""
    expected = single(WAYS[way][0])
    assert len(expected["train/loss"]) == 4
    assert two(way).keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(two(way)[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_of_locked_parameters_are_not_sent(two: Results) -> None:
    sent, learning, whole = two("sent")["bytes"].tolist()
    assert sent == learning < whole / 4
