"""The benchmark of what feeds a GPU, at sizes too small to measure speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.runs import run

from clipx.bench.feeding import KINDS
from clipx.bench.feeds import FeedsSpec
from clipx.errors import ConfigError


@pytest.mark.slow
def test_every_kind_is_loaded_and_the_cores_follow_from_the_rates(tmp_path: Path) -> None:
    words = ("feeds", "samples=4", "repeats=1", "rates=[500,2000]", f"run_dir={tmp_path}/found")
    done = run(sys.executable, "-m", "clipx.bench", *words)
    figures = json.loads(done.stdout.splitlines()[-1])
    times = figures["microseconds"]
    assert times.keys() == figures["bytes"].keys() == KINDS.keys()
    assert times["features"] < times["original_1024"]
    assert figures["bytes"]["features"] < figures["bytes"]["square_224_q90"] < figures["bytes"]["keep_ratio_256_q95"]
    assert figures["cores"].keys() == {"500", "2000"}
    for kind, took in times.items():
        assert figures["cores"]["2000"][kind] == pytest.approx(2000 * took / 1e6, rel=1e-3)
    assert "2,000/s" in done.stdout


@pytest.mark.parametrize("rates", [[], [8000, 0]])
def test_a_rate_is_at_least_1(rates: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"^rates=.* must contain numbers of at least 1: \[10200\]$"):
        FeedsSpec(run_dir="here", rates=rates)
