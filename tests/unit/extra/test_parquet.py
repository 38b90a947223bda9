"""Parquet files with images inside: rows become samples, row groups are read whole, faults are reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.samples import jpeg

from clipx.data.loader_process import this_process
from clipx.data.shards.shards import Shards
from clipx.data.source import BadSample, Source
from clipx.extra.hf.parquet import ParquetSpec

pytestmark = pytest.mark.usefixtures("own_cache")


def row(i: int) -> dict[str, Any]:
    """Returns a row as Hugging Face writes it."""
    return {"image": {"bytes": jpeg(i), "path": f"{i}.jpg"}, "caption": f"caption {i}", "label": i % 3}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=10)
    return path


def spec(path: object, **options: Any) -> ParquetSpec:
    return ParquetSpec(**{"name": "rows", "path": str(path), "held_out_share": 0.0, **options})


def open_train(path: object, **options: Any) -> Source:
    return spec(path, **options).open().train


def reason_of(source: Source, index: int) -> str:
    with pytest.raises(BadSample) as bad:
        source.read(index)
    return str(bad.value)


def test_rows_are_samples_and_row_groups_are_shards(tmp_path: Path) -> None:
    for k in range(2):
        write(tmp_path / f"train-{k}.parquet", [row(i) for i in range(25 * k, 25 * k + 25)])
    data = spec(tmp_path / "train-*.parquet", label_column="label").open()
    assert (data.train.sizes, data.whole_shards) == ([10, 10, 5, 10, 10, 5], True)
    for i in range(50):
        sample = data.train.read(i)
        assert (sample.image, sample.captions, sample.label) == (jpeg(i), [f"caption {i}"], i % 3)
    assert data.train.key(27) == f"{tmp_path}/train-1.parquet#0:2"


def test_row_groups_or_rows_are_held_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row(i) for i in range(80)])
    groups = spec(file, held_out_share=0.25).open()
    assert groups.held_out is not None
    assert (sum(groups.train.sizes), groups.held_out.sizes) == (60, [10, 10])
    assert groups.train.fingerprint != groups.held_out.fingerprint
    rows = spec(file, held_out_share=0.1).open()
    assert rows.held_out is not None
    assert sum(rows.held_out.sizes) == 8
    files = spec(file, held_out_path=str(file)).open()
    assert files.held_out is not None
    assert sum(files.held_out.sizes) == 80
    assert sum(spec(file, held_out_share=0.25).open_for_evaluation().held_out.sizes) == 80  # type: ignore[union-attr]


def test_a_row_group_is_fetched_ahead_and_removed_when_it_is_done(tmp_path: Path) -> None:
    source = open_train(write(tmp_path / "a.parquet", [row(i) for i in range(30)]))
    assert isinstance(source, Shards)
    stored = tmp_path / "cache" / "shards"
    source.prefetch([], later=[0, 10])
    for future in list(this_process().ahead.values()):
        future.result()
    assert len(list(stored.glob("*.tar"))) == 2
    assert source.read(10).captions == ["caption 10"]
    source.prefetch([], done=[10])
    assert len(list(stored.glob("*.tar"))) == 1
    assert source.read(10).captions == ["caption 10"], "it is stored again"


def test_bad_rows_are_bad_samples_with_reasons(tmp_path: Path) -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"image": None}, "image is missing or empty"),
        ({"image": {"bytes": None, "path": "1.jpg"}}, "image is missing or empty"),
        ({"image": {"bytes": b"", "path": "2.jpg"}}, "image is missing or empty"),
        ({"caption": None}, "caption is missing or empty"),
        ({"caption": ""}, "caption is missing or empty"),
        ({"caption": "  "}, "caption is missing or empty"),
        ({"label": None}, "label is missing"),
    ]
    rows = [{**row(i), **fault} for i, (fault, _) in enumerate([*faults, ({}, "")])]
    source = open_train(write(tmp_path / "a.parquet", rows), label_column="label")
    assert [reason_of(source, i) for i in range(7)] == [reason for _, reason in faults]
    assert source.read(7).captions == ["caption 7"]
