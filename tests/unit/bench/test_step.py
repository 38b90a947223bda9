"""`python -m clipx.bench step`: the runs that its words select, and their measurement."""

from __future__ import annotations

import pytest
import torch
from helpers.runs import VIT, compose

from clipx.bench.step import StepSpec, gathered
from clipx.bench.training import memory, times
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError


def spec(*words: str) -> StepSpec:
    found = compose("bench=step", *gathered(words), config_name="bench")
    assert isinstance(found, StepSpec)
    return found


def test_keys_of_the_benchmark_and_overrides_of_its_runs_are_separated() -> None:
    made = spec(
        "batch=8", "model.patch_dropout=0,0.5", "device=cpu", "+model.image.options={depth:2}", "data.name='a,b'"
    )
    assert (made.batch, made.device) == (8, "cpu")
    assert made.overrides == ["model.patch_dropout=0,0.5", "+model.image.options={depth:2}", "data.name='a,b'"]
    assert gathered(["--cfg", "job", "batch=8"]) == ["--cfg", "job", "batch=8"]


def test_comma_separated_values_are_runs_named_by_their_differences() -> None:
    fixed = ["model=tiny", "data.name='a,b'"]
    assert spec(*fixed, "model.text.layers=2,3", "precision=fp32,fp64").runs() == {
        f"model.text.layers={layers} precision={precision}": [
            *fixed, f"model.text.layers={layers}", f"precision={precision}"
        ]
        for layers in (2, 3)
        for precision in ("fp32", "fp64")
    }  # fmt: skip
    assert spec().runs() == {"step": ["model=vit_b32"]}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.batch_size=8", "data.batch_size=8 is set by this benchmark: give batch="),
        (
            "stages=[{until:50%,lr_scale:2},{}]",
            "covers several steps: compare the stages' values, such as model.image.size=112,224",
        ),
        ("model.patch_dropout=0,1", "model.patch_dropout=1.0 must be in"),
        ("bacth=8", "bacth is not a key here"),
    ],
)
def test_unsupported_overrides_are_rejected_at_composition(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec(word)
    assert message in str(error.value)


def test_each_run_is_measured_with_its_overrides() -> None:
    here = Comm(0, 1, 0, torch.device("cpu"))
    runs = spec("model=tiny", *VIT, "model.patch_dropout=0,0.5").runs()
    took, losses = times(here, runs, False, 4, 2, 0)
    assert list(took) == list(losses) == ["model.patch_dropout=0", "model.patch_dropout=0.5"]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in took.values())
    # equal weights and batch: only the option differs
    assert losses["model.patch_dropout=0"] != losses["model.patch_dropout=0.5"]
    assert memory(here, runs["model.patch_dropout=0.5"], 4, 0) > 0
