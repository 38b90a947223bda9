"""The benchmark of augmentations, at sizes too small to measure speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.runs import run

from clipx.bench.augment import AugmentBenchSpec
from clipx.bench.augmenting import CASES
from clipx.errors import ConfigError


@pytest.mark.slow
def test_every_augmentation_is_compared_with_plain_loading(tmp_path: Path) -> None:
    words = ("augment", "side=64", "samples=4", "repeats=2", f"run_dir={tmp_path}/found")
    done = run(sys.executable, "-m", "clipx.bench", *words)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ratios"].keys() == figures["microseconds"].keys() == CASES.keys()
    assert figures["ratios"]["plain"] == 1
    assert figures["microseconds"]["color_jitter"] > figures["microseconds"]["plain"]
    assert set(figures["tensor_microseconds"]) == {name for name, case in CASES.items() if case.augment is not None}
    assert "color_jitter, hue=0" in done.stdout


@pytest.mark.parametrize(("options", "message"), [({"side": 8}, "side=8 must be"), ({"samples": 0}, "samples=0 must")])
def test_options_have_limits(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        AugmentBenchSpec(run_dir="here", **options)
