"""Configurations of the benchmarks."""

from __future__ import annotations

import re

import pytest
from helpers.runs import compose

from clipx.bench.spec import BenchSpec
from clipx.config.registry import CONF_DIR

NAMES = sorted(path.stem for path in (CONF_DIR / "bench").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_composes_with_its_keys_at_the_top_level(name: str) -> None:
    spec = compose(f"bench={name}", "device=cpu", config_name="bench")
    assert isinstance(spec, BenchSpec)
    assert (spec.kind, spec.device) == (name, "cpu")
    assert re.fullmatch(rf"outputs/bench-{name}-\d{{8}}-\d{{6}}", spec.run_dir)
