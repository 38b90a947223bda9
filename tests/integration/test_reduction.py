"""Sums of gradients over micro-batches and ranks, in the number formats and ways of data parallelism."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.runs import VIT, compose, torchrun
from safetensors.torch import load_file

from clipx.errors import ConfigError

SCRIPT = str(SCRIPTS / "master_gradients.py")
LOSSES = str(SCRIPTS / "losses_on_ranks.py")
SHORT = (*VIT, "data.samples=192", "duration=4st", "checkpoint=none")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, ()), *((ranks, words) for ranks in (2, 4) for words in ((), ("gradient_as_bucket_view=true",)))],
)
def test_master_gradients_are_summed_in_float32(
    ranks: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 micro-batches on each rank, compared with a sum in float64 of the gradients of each micro-batch."""
    out = tmp_path / "errors.safetensors"
    if ranks == 1:
        monkeypatch.setattr(sys, "argv", [SCRIPT, str(out)])
        runpy.run_path(SCRIPT)
    else:
        torchrun(ranks, SCRIPT, str(out), *words)
    found = load_file(out)
    assert found["masters"] < 1e-6
    assert found["narrow"] > 1e-3  # in 16 bits, as without the masters


def test_compression_rounds_the_sums_of_master_gradients_once(tmp_path: Path) -> None:
    torchrun(2, SCRIPT, str(tmp_path / "errors.safetensors"), "compression=bf16")
    found = load_file(tmp_path / "errors.safetensors")
    assert 1e-4 < found["masters"] < 2**-7


# ---------------------------------------------------------------------------------- recipes that errors recommend

REFUSED = (
    ("distributed=fsdp", "precision=bf16"),
    ("distributed=fsdp", "precision=fp16"),
    ("distributed=fsdp", "distributed.param_dtype=bfloat16", "precision=fp32"),
    ("distributed=fsdp", "distributed.param_dtype=bfloat16", "precision=fp64"),
    ("distributed=fsdp", "distributed.param_dtype=float32", "precision=bf16", "precision.master_weights=false"),
)


def recommended(*words: str) -> list[str]:
    """Returns the options that the error of these words recommends, in place of those that it names."""
    with pytest.raises(ConfigError) as error:
        compose(*words)
    recipe = re.search(r"use ((?:[a-z_.]+=\w+ ?)+)", str(error.value))
    assert recipe is not None, str(error.value)
    found = dict(word.split("=", 1) for word in recipe[1].split())
    others = [word for word in words if not word.startswith("precision")]
    return [*[word for word in others if word.partition("=")[0] not in found], *(f"{k}={v}" for k, v in found.items())]


@pytest.mark.slow
def test_the_recipe_of_each_error_trains_like_ddp(tmp_path: Path) -> None:
    """bfloat16 weights gathered by FSDP: losses on two ranks within the rounding of autocast's own casts."""
    recipes = {" ".join(recommended(*words)): recommended(*words) for words in REFUSED}
    assert "distributed=fsdp precision=amp_bf16" in recipes
    runs = {"ddp": ["precision=amp_bf16"], **{str(i): words for i, words in enumerate(recipes.values())}}
    torchrun(2, LOSSES, str(tmp_path), *(f"{n}={json.dumps([*SHORT, *words])}" for n, words in runs.items()))
    expected = load_file(tmp_path / "ddp.safetensors")["loss"]
    for i, recipe in enumerate(recipes):
        found = load_file(tmp_path / f"{i}.safetensors")["loss"]
        assert len(found) == 4
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01, msg=recipe)


def test_16_bit_formats_on_two_ranks_match_one_process(tmp_path: Path) -> None:
    """Micro-batches, masters and reduction in float32: losses stay as close as those of one process."""
    words = {"bf16": ["precision=bf16", "data.micro_batches=4"], "fp16": ["precision=fp16", "data.micro_batches=2"]}
    words["plain"] = ["precision=bf16", "precision.master_weights=false"]
    words["fp32"] = ["precision=fp32"]
    torchrun(2, LOSSES, str(tmp_path), *(f"{n}={json.dumps([*SHORT, *own])}" for n, own in words.items()))
    found = {name: load_file(tmp_path / f"{name}.safetensors")["loss"] for name in words}
    for name, limit in (("bf16", 0.01), ("fp16", 0.002), ("plain", 0.1)):
        assert 0 < (found[name] - found["fp32"]).abs().max() < limit, name
