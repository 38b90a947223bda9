"""Parquet files with images inside: rows become samples, row groups are read whole, faults are reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.s3_server import FaultyProxy, admin, forget_sessions
from helpers.samples import jpeg

from clipx.data.parquet import ParquetSpec
from clipx.data.shards import first_use
from clipx.data.shards.shards import Shards
from clipx.data.source import BadSample, Source
from clipx.storage.traffic import take_traffic

GROUP = 10  # rows of a row group
pytestmark = pytest.mark.usefixtures("own_cache")


def row(i: int) -> dict[str, Any]:
    """Returns a row as Hugging Face writes it."""
    return {
        "image": {"bytes": jpeg(i), "path": f"{i}.jpg"},
        "caption": f"caption {i}",
        "texts": [f"text {i}", "", f"another {i}"],
        "label": i % 3,
        "unread": bytes(5000),
    }


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=GROUP)
    return path


def spec(path: object, **options: Any) -> ParquetSpec:
    return ParquetSpec(**{"name": "rows", "path": str(path), "held_out_share": 0.0, **options})


def open_train(path: object, **options: Any) -> Source:
    return spec(path, **options).open().train


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "shards").glob("*.tar"))


def reason_of(source: Source, index: int) -> str:
    with pytest.raises(BadSample) as bad:
        source.read(index)
    return str(bad.value)


# ------------------------------------------------------------------------------------------------------ reading


def test_rows_are_samples_and_row_groups_are_shards(tmp_path: Path) -> None:
    for k in range(2):
        write(tmp_path / f"train-{k}.parquet", [row(i) for i in range(25 * k, 25 * k + 25)])
    data = spec(tmp_path / "train-*.parquet", label_column="label").open()
    assert (data.train.sizes, data.whole_shards) == ([10, 10, 5, 10, 10, 5], True)
    for i in range(50):
        sample = data.train.read(i)
        assert (sample.image, sample.captions, sample.label) == (jpeg(i), [f"caption {i}"], i % 3)
    assert data.train.key(27) == f"{tmp_path}/train-1.parquet#0:2"


def test_images_may_be_plain_bytes_and_captions_lists_with_weights(tmp_path: Path) -> None:
    rows = [{**row(i), "image": jpeg(i)} for i in range(5)]
    file = write(tmp_path / "a.parquet", rows)
    assert open_train(file, caption_column="texts").read(3).captions == ["text 3", "another 3"]
    sample = open_train(file, caption_column={"texts": 0.3, "caption": 0.7}).read(3)
    assert list(sample.captions_by_key) == [(0.7, ["caption 3"]), (0.3, ["text 3", "another 3"])]


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
    source.prefetch([], later=[0, 10])
    for future in list(first_use._process(first_use.os.getpid()).ahead.values()):
        future.result()
    assert len(cached(tmp_path)) == 2
    assert source.read(10).captions == ["caption 10"]
    source.prefetch([], done=[10])
    assert len(cached(tmp_path)) == 1
    assert source.read(10).captions == ["caption 10"], "it is stored again"


# ------------------------------------------------------------------------------------------------------- faults


def test_bad_rows_are_bad_samples_with_reasons(tmp_path: Path) -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"image": None}, "image is missing or empty"),
        ({"image": {"bytes": None, "path": "1.jpg"}}, "image is missing or empty"),
        ({"image": {"bytes": b"", "path": "2.jpg"}}, "image is missing or empty"),
        ({"caption": None}, "caption is missing or empty"),
        ({"caption": ""}, "caption is missing or empty"),
        ({"caption": "  "}, "caption is empty"),
        ({"label": None}, "label is missing"),
    ]
    rows = [{**row(i), **fault} for i, (fault, _) in enumerate([*faults, ({}, "")])]
    source = open_train(write(tmp_path / "a.parquet", rows), label_column="label")
    assert [reason_of(source, i) for i in range(7)] == [reason for _, reason in faults]
    assert source.read(7).captions == ["caption 7"]


# ------------------------------------------------------------------------------------------------------- remote


@pytest.fixture
def bucket(own_bucket: str, proxy: FaultyProxy, endpoint: str, tmp_path: Path) -> str:
    """A bucket of a file with three row groups; tmp_path has a copy."""
    file = write(tmp_path / "a.parquet", [row(i) for i in range(30)])
    admin(endpoint).put_file(str(file), f"{own_bucket}/a.parquet")
    forget_sessions()
    take_traffic()
    return own_bucket


def test_rows_on_s3_equal_local_rows_and_a_row_group_costs_a_request_for_each_column(
    bucket: str, tmp_path: Path
) -> None:
    far = open_train(f"{bucket}/*.parquet", label_column="label")
    near = open_train(tmp_path / "a.parquet", label_column="label")
    assert take_traffic().requests == 2, "the size and the footer"
    assert (far.sizes, far.fingerprint) == (near.sizes, near.fingerprint)
    assert far.read(0) == near.read(0)
    traffic = take_traffic()
    assert traffic.requests == 3, "image, caption and label"
    assert [far.read(i) for i in range(10)] == [near.read(i) for i in range(10)]
    assert take_traffic().requests == 0
    group = pq.read_metadata(tmp_path / "a.parquet").row_group(0)
    columns = [group.column(k) for k in range(group.num_columns)]
    sizes = {column.path_in_schema: column.total_compressed_size for column in columns}
    assert traffic.bytes == sizes["image.bytes"] + sizes["caption"] + sizes["label"]
