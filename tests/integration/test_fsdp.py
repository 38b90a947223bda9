"""Sharded models train like models that each rank holds completely."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.cases import slow_except
from helpers.runs import VIT, compose, torchrun
from helpers.scripts.fsdp_training import trained
from safetensors.torch import load_file

from clipx.distributed.fsdp import FsdpSpec
from clipx.errors import ConfigError

SCRIPT = str(SCRIPTS / "fsdp_training.py")
SIX = (
    *VIT,
    "duration=6st",
    "data.samples=192",
    "evaluator=[retrieval]",
    "evaluator.retrieval.every=3st",
)
FSDP = "distributed=fsdp"
SAVED = "checkpoint.every=3st"
OBJECTIVES = {
    "infonce": ("objective=infonce",),
    "siglip": ("objective=siglip",),
    "fastclip_v3": ("objective=fastclip_v3", "objective.rho=2.9"),
    "captions": ("objective.same_caption=positive", "data.captions_per_step=3"),
    "lamb": ("optimizer=lamb",),
    "muon": ("optimizer=muon",),
}
RHO = ("isogclr", "fastclip_v2")
# A ResNet whose BatchNorms see the samples of all ranks: three steps, because it has more layers.
RESNET = (
    "checkpoint=none",
    "duration=3st",
    "data.samples=96",
    "evaluator=[retrieval]",
    "evaluator.retrieval.every=end",
)
Tensors = dict[str, torch.Tensor]
Results = Callable[[str], Tensors]  # of an objective, or of a way to train on two ranks


def train_on_ranks(ranks: int, folder: Path, ways: dict[str, tuple[str, ...]]) -> dict[str, Tensors]:
    overrides = {
        name: [*SIX, SAVED if name in ("fsdp", "muon") else "checkpoint=none", *OBJECTIVES[objective], *words]
        for name, (objective, *words) in ways.items()
    }
    torchrun(ranks, SCRIPT, str(folder), *(f"{name}={json.dumps(words)}" for name, words in overrides.items()))
    return {name: load_file(folder / f"{name}.safetensors") for name in ways}


def assert_same(found: Tensors, expected: Tensors, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Trains in one process on the whole batch, once for each objective."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda name: trained(folder / name, [*SIX, "checkpoint=none", *OBJECTIVES[name]]))


WAYS = {
    "ddp": ("infonce",),
    "static": ("infonce", "distributed.static_graph=true", "distributed.gradient_as_bucket_view=true"),
    "fsdp": ("infonce", FSDP),
    "kept": ("siglip", FSDP, "distributed.reshard_after_forward=false"),
    "lamb": ("lamb", FSDP),
    "muon": ("muon", FSDP),
    "muon_ddp": ("muon",),
    "muon_micro": ("muon", FSDP, "data.micro_batches=2"),
    "compressed": ("infonce", "distributed.compression=bf16"),
    "recomputed": (
        "infonce",
        FSDP,
        "data.micro_batches=2",
        "model.image.checkpointing=1",
        "model.text.checkpointing=1",
    ),
    "micro": ("fastclip_v3", FSDP, "data.micro_batches=2"),
    "captions": ("captions", FSDP, "data.micro_batches=2"),
}
QUICK = ("ddp", "fsdp", "compressed")
COMPILED = {
    "compiled_ddp": ("infonce", "data.micro_batches=2", "compile.towers=true", "compile.backend=aot_eager"),
    "compiled_fsdp": ("infonce", FSDP, "compile.towers=true", "compile.backend=aot_eager"),
    "compiled_captions": (
        "captions",
        "data.micro_batches=2",
        "compile.towers=true",
        "compile.objective=true",
        "compile.backend=aot_eager",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    """Trains on two ranks, all quick ways or all others in one launch."""
    found = functools.cache(
        lambda quick: train_on_ranks(2, folder, {way: WAYS[way] for way in WAYS if (way in QUICK) == quick})
    )
    return lambda way: found(way in QUICK)[way]


@pytest.mark.slow
@pytest.mark.parametrize("way", COMPILED)
def test_compiled_towers_on_two_ranks_match_a_single_process(way: str, tmp_path: Path, single: Results) -> None:
    found = train_on_ranks(2, tmp_path, {way: COMPILED[way]})
    assert_same(found[way], single(COMPILED[way][0]), 1e-9)


@pytest.mark.parametrize("way", slow_except([way for way in WAYS if way != "compressed"], "ddp", "fsdp"))
def test_six_steps_on_two_ranks_match_a_single_process(way: str, two: Results, single: Results) -> None:
    """Losses, the clipped norm, weights, their average and evaluation results: float64, to 1e-9."""
    assert len(two(way)["train/loss"]) == 6
    assert_same(two(way), single(WAYS[way][0]), 1e-9)


@pytest.mark.parametrize(
    ("way", "objective"), [("fsdp", "infonce"), pytest.param("muon", "muon", marks=pytest.mark.slow)]
)
def test_a_sharded_run_resumes_in_a_single_process(
    way: str, objective: str, tmp_path: Path, folder: Path, two: Results, single: Results
) -> None:
    run_dir = tmp_path / "again"
    two(way)
    shutil.copytree(folder / f"{way}.run", run_dir)
    found = trained(run_dir, [*SIX, *OBJECTIVES[objective], SAVED, "resume=step:3"])
    assert_same(found, single(objective), 1e-9)


def test_gradients_reduced_in_16_bits_change_results_little(two: Results) -> None:
    found, whole = two("compressed")["train/loss"], two("ddp")["train/loss"]
    assert (found - whole).abs().max() < 0.01
    assert not torch.equal(found[2:], whole[2:])


@pytest.mark.slow
def test_synced_batch_norms_match_a_single_process_on_the_whole_batch(tmp_path: Path) -> None:
    """Weights and running statistics, also with norms inside micro-batches: float64, to 1e-9."""
    expected = trained(tmp_path / "alone", list(RESNET))
    words = json.dumps([*RESNET, "distributed.sync_batchnorm=true"])
    torchrun(2, SCRIPT, str(tmp_path), f"synced={words}", f"own={json.dumps(RESNET)}")
    assert_same(load_file(tmp_path / "synced.safetensors"), expected, 1e-9)
    own = load_file(tmp_path / "own.safetensors")
    assert (own["train/loss"] - expected["train/loss"]).abs().max() > 1e-4, "unsynchronised norms gave the same result"


@pytest.mark.slow
def test_hybrid_sharding_matches_a_single_process(tmp_path: Path, single: Results) -> None:
    ways = {
        "hybrid": ("infonce", FSDP, "distributed.shard_size=2"),
        "hybrid_muon": ("muon", FSDP, "distributed.shard_size=2"),
        "fsdp": ("fastclip_v3", FSDP),
    }
    found = train_on_ranks(4, tmp_path, ways)
    assert_same(found["hybrid"], single("infonce"), 1e-9)
    assert_same(found["hybrid_muon"], single("muon"), 1e-9)
    assert_same(found["fsdp"], single("fastclip_v3"), 1e-9)


@pytest.mark.slow
def test_every_other_objective_matches_a_single_process(tmp_path: Path) -> None:
    """Two ranks, two micro-batches, float64, to 1e-9."""
    others = ("dcl", "sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2")
    words = {
        name: [*SIX, "checkpoint=none", f"objective={name}", *(["objective.rho=2.9"] if name in RHO else [])]
        for name in others
    }
    spread = {name: json.dumps([*own, FSDP, "data.micro_batches=2"]) for name, own in words.items()}
    torchrun(2, SCRIPT, str(tmp_path), *(f"{name}={text}" for name, text in spread.items()))
    for name, own in words.items():
        assert_same(load_file(tmp_path / f"{name}.safetensors"), trained(tmp_path / f"{name}.alone", own), 1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["distributed.static_graph=true", "data.micro_batches=2"],
            "distributed.static_graph=true does not support data.micro_batches=2",
        ),
        ([FSDP, "precision=fp32", "distributed.param_dtype=bfloat16"], "distributed.param_dtype=bfloat16 with precision=fp32 gives a layer inputs and weights of different dtypes: use precision=amp_bf16, or remove"),
        ([FSDP, "distributed.shard_size=1"], "distributed.shard_size=1 must be at least 2, or null for all ranks"),
        ([FSDP, "distributed.static_graph=true"], "distributed.static_graph is not a key here: the keys are device, backend"),
    ],
)  # fmt: skip
def test_invalid_combinations_are_rejected_at_composition(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        compose(*words)


def test_an_optimizer_that_is_not_shardable_is_rejected() -> None:
    with pytest.raises(ConfigError, match="optimizer=other needs whole parameters, which distributed=fsdp shards"):
        FsdpSpec().check_optimizer("other", shardable=False)
