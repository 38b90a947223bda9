"""Selection with files that are damaged, of another length, or on a storage that fails."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.s3_server import FaultyProxy, admin, forget_sessions
from helpers.samples import img2dataset, write_tar

from clipx.data.spec import Dataset
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ClipxError

TOTAL = 24


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        write_tar(folder / f"{shard:05d}.tar", img2dataset(range(12 * shard, 12 * shard + 12)))
    return folder


def opened(shards: Path, **options: Any) -> Dataset:
    return WebDatasetSpec(name="mine", shards=f"{shards}/*.tar", held_out_share=0.0, **options).open()


def write_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes a file of each format. Returns the options that use it."""
    keys = [f"{i:09d}" for i in range(TOTAL)]
    uids = [hashlib.md5(key.encode(), usedforsecurity=False).hexdigest() for key in keys]
    np.save(folder / "ids.npy", np.arange(TOTAL))
    np.save(folder / "weights.npy", np.ones(TOTAL))
    pq.write_table(pa.table({"key": keys}), folder / "ids.parquet")
    pq.write_table(pa.table({"score": np.arange(TOTAL) / TOTAL}), folder / "table.parquet")
    pq.write_table(pa.table({"weight": np.ones(TOTAL)}), folder / "weights.parquet")
    (folder / "uids.txt").write_text("\n".join(uids))
    found = {name: {"weights": str(folder / name)} for name in ("weights.npy", "weights.parquet")}
    found |= {name: {"keep": str(folder / name)} for name in ("ids.npy", "ids.parquet", "uids.txt")}
    return {**found, "table.parquet": {"where": "score >= 0.5", "table": str(folder / "table.parquet")}}


def test_a_truncated_file_is_a_one_line_error_that_names_it(shards: Path, tmp_path: Path) -> None:
    for name, options in write_files(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 5])
        with pytest.raises(ClipxError, match=f"{path}.*(cannot be read|is not 32 hexadecimal digits)") as failed:
            opened(shards, **options)
        assert "\n" not in str(failed.value), name


@pytest.fixture
def bucket(endpoint: str, own_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Files on S3, read in blocks of 4 KiB, so that each needs several requests."""
    rng, storage = np.random.default_rng(0), admin(endpoint)
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("clipx.data.shards.remote.BLOCK", 1 << 12)
    rows = [f"{i:09d}" for i in range(TOTAL)] + [f"other {i}" for i in range(2000)]
    pq.write_table(pa.table({"key": rows, "score": rng.random(len(rows))}), tmp_path / "table.parquet")
    (tmp_path / "keys.txt").write_text("\n".join(rows))
    for name in ("table.parquet", "keys.txt"):
        storage.put_file(str(tmp_path / name), f"{own_bucket.removeprefix('s3://')}/{name}")
    return own_bucket


REMOTE = {"table.parquet": {"where": "score < 2", "table": "{}"}, "keys.txt": {"keep": "{}"}}


@pytest.mark.parametrize("name", REMOTE)
def test_a_file_is_read_through_an_outage_of_its_storage_and_a_long_one_is_an_error(
    shards: Path, bucket: str, proxy: FaultyProxy, name: str
) -> None:
    options = {key: value.format(f"{bucket}/{name}") for key, value in REMOTE[name].items()}
    proxy.set("some", 3)  # every third request fails
    data = opened(shards, **options)
    assert sum(data.train.sizes) == TOTAL
    assert proxy.requests > 10
    assert any(f"2,000 of {TOTAL + 2000:,} keys are not in the data" in note for note in data.notes)
    proxy.set("status", 503)
    forget_sessions()
    with pytest.raises(ClipxError, match=rf"{name}.*cannot be read: the storage failed for .* raise retry_s=0.5") as failed:  # fmt: skip
        opened(shards, **options, retry_s=0.5)
    assert "\n" not in str(failed.value)
