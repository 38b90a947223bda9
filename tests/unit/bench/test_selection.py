"""`clipx.bench selection` at a small size: every kind of file selects half of the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs import compose

from clipx.bench.selection import SelectionSpec
from clipx.errors import ConfigError


@pytest.mark.slow
def test_every_kind_of_file_is_measured(tmp_path: Path) -> None:
    spec = compose("bench=selection", "samples=[400]", "per_shard=100", f"run_dir={tmp_path}", config_name="bench")
    assert isinstance(spec, SelectionSpec)
    found = spec.run(lambda line: None).figures["400"]
    assert [found[name]["selected"] for name in ("all samples", "weights")] == [400, 400]
    halves = ("keep: true and false", "keep: indices", "keep: uids, tables of the shards")
    assert [found[name]["selected"] for name in halves] == [200, 200, 200]
    assert all(0 < found[name]["selected"] < 300 for name in found if name not in ("all samples", "weights"))
    assert all(each["first_s"] > 0 and each["later_s"] > 0 for each in found.values())


@pytest.mark.parametrize("words", [("samples=[]",), ("samples=[150]", "per_shard=100"), ("per_shard=0",)])
def test_wrong_sizes_are_errors(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"(samples|per_shard)="):
        compose("bench=selection", *words, config_name="bench")
