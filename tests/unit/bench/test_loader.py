"""The loader benchmark through its command, at sizes too small to measure speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.runs import run

from clipx.bench import pipelines
from clipx.bench.loader_advice import Facts, verdict

BENCH = (sys.executable, "-m", "clipx.bench", "loader")


@pytest.mark.slow
def test_both_loaders_run_and_the_last_line_is_json(tmp_path: Path) -> None:
    sizes = ("sides=[64]", "samples=64", "batch=8", "workers=1", "batches=2", "repeats=1")
    done = run(*BENCH, *sizes, f"run_dir={tmp_path}/found")
    figures = json.loads(done.stdout.splitlines()[-1])
    rates = figures["images_per_second"]["64"]
    assert rates.keys() == {"clipx", "open_clip", "decode"} and min(rates.values()) > 0
    assert figures["share_of_decode_bound_64"] == pytest.approx(rates["clipx"] / rates["decode"], rel=0.1)
    assert figures["ratio_64"] == pytest.approx(rates["clipx"] / rates["open_clip"], rel=0.1)
    assert json.loads((tmp_path / "found" / "results.json").read_text())["figures"] == figures
    assert "clipx / open_clip" in done.stdout


def test_batches_that_are_ready_with_the_first_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def batches() -> Iterator[None]:
        """Yields a batch after 10 s, three that were prefetched meanwhile in 1 s each, and then one every 2 s."""
        nonlocal now
        for seconds in (10.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
            now += seconds
            yield

    monkeypatch.setattr(pipelines, "time", SimpleNamespace(perf_counter=lambda: now))
    assert pipelines._per_second(batches(), batch=8, count=3, ready=3) == 4.0


US = {"image": 700.0, "whole": 800.0}


def facts(**values: Any) -> Facts:
    """A loader of two processes on four cores: 2,500 samples per second for a GPU that takes 4,000."""
    known: dict[str, Any] = {"rate": 2500.0, "trained": 2000.0, "wait": 0.5, "workers": 2, "cores": 4, "size": 256}
    known |= {"remote": False, "whole_shards": False, "cache_gb": 0.0, "us": {**US, "wait": 0.0}}
    return Facts(**known | values)


def test_the_verdict_names_the_largest_phase_of_a_run_that_does_not_wait() -> None:
    fast = facts(wait=0.01)
    said = verdict(fast, {"data_wait": 1.0, "step": 20.0, "checkpoint": 79.0})
    assert said.startswith("the run does not wait for its loader (1% of the time)")
    assert "train/checkpoint_s with 79%: save less often" in said
    waits = verdict(facts(), {})
    assert "without waiting would train 4,000" in waits and "images take 88% of the CPU time" in waits
