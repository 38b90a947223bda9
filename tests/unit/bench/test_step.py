"""`python -m clipx.bench step`: the runs that its words select, and their measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.runs import VIT, compose

from clipx.bench import shards
from clipx.bench.laps import StepRace, StepRow, race
from clipx.bench.step import StepSpec, gathered
from clipx.distributed.comm import Comm
from clipx.model.flops import ForwardFlops
from clipx.model.packing import TextPacker
from clipx.model.tokenizer import Tokenizer


def spec(*words: str) -> StepSpec:
    found = compose("bench=step", *gathered(words), config_name="bench")
    assert isinstance(found, StepSpec)
    return found


def course(*words: str, rivals: Sequence[str] = (), **changes: Any) -> StepRace:
    made = StepRace(spec("model=tiny", *VIT, *words).runs(), rivals, batch=4, steps=2, rounds=2, seed=0)
    return replace(made, **changes)


HERE = Comm(0, 1, 0, torch.device("cpu"))


def test_a_step_of_open_clip_is_its_trainers_on_the_same_data_and_towers() -> None:
    ours, theirs = race(HERE, course("precision=fp32", rivals=["eager"]))[0]
    assert (ours.implementation, theirs.implementation) == ("clipx", "open_clip")
    assert theirs.name == "open_clip fp32 eager"
    assert (ours.tokens, ours.tflops_padded * ours.seconds) == (
        theirs.tokens,
        pytest.approx(theirs.tflops_padded * theirs.seconds, rel=1e-2),
    )
    assert ours.tflops_packed < ours.tflops_padded and theirs.loss > 0
    assert ours.samples_per_second * ours.seconds == pytest.approx(4, rel=1e-3)
    assert ours.tflops_padded * ours.seconds == pytest.approx(4 * 3e-12 * forward_flops(), rel=1e-2)


def forward_flops() -> float:
    found = ForwardFlops.count(course().spec("step").model)
    return found.image + found.text


def test_ratios_are_the_times_by_those_of_the_first_run() -> None:
    """Measures open_clip by its fastest variant: samples/s of the first run by those of open_clip."""
    rest = ("tiny", "fp32", False, [], 4, False, 1.0, 1.0, 1.0, 7.0, 1.0, 1.0, None, None)
    kinds = {"a": "clipx", "b": "clipx", "slow": "open_clip", "fast": "open_clip"}
    rows = [StepRow(name, kind, *rest) for name, kind in kinds.items()]
    times = {"a": [1.0, 2.0], "b": [0.5, 1.0], "slow": [3.0, 6.0], "fast": [2.0, 4.0]}
    found = spec("model=tiny")._findings("cpu", course(), rows, times).figures
    assert found["step_ratios"] == {"a": 1.0, "b": 0.5, "slow": 3.0, "fast": 2.0}
    assert found["open_clip_ratio"] == 2.0


def test_a_caption_has_as_many_tokens_as_are_counted() -> None:
    texts = [shards.caption_of(0, i) for i in range(200)]
    counted = TextPacker(True).count(Tokenizer(77)(texts)) / 200
    assert shards.mean_tokens(200, 77, 0) == counted
    assert 10 < counted < 25 and len({len(text.split()) for text in texts}) > 10
