"""Captions from Parquet files beside those in the shards: rows by key, missing rows, held-out samples and fingerprints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.samples import img2dataset, write_tar

from clipx.data.source import Source
from clipx.data.spec import Dataset, open_data
from clipx.data.webdataset import WebDatasetSpec

KEY = {"txt": 0.25, "table.recaption": 0.75}
MISSING = (3, 25)  # samples without a row, and 7 and 27 without a usable caption


def recaptions(i: int) -> list[str | None] | None:
    return {7: None, 27: [" ", None]}.get(i, [f"synthetic {i} one", f"synthetic {i} two"])


def table(samples: list[int], folder: Path, name: str) -> None:
    """Writes the table of a shard, its rows in another order than the samples."""
    rows = sorted((i for i in samples if i not in MISSING), key=lambda i: i * 7 % 20)
    keys = [f"{i:09d}" for i in rows]
    folder.mkdir(exist_ok=True)
    columns = {"key": keys, "recaption": [recaptions(i) for i in rows], "one": [f"single {i}" for i in rows]}
    pq.write_table(pa.table({**columns, "similarity": [0.5] * len(rows)}), folder / f"{name}.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    for k in range(2):
        samples = list(range(20 * k, 20 * k + 20))
        write_tar(root / f"{k:05d}.tar", img2dataset(samples))
        table(samples, root, f"{k:05d}")
    return root


def opened(folder: Path, caption_key: Any = KEY, **options: Any) -> Dataset:
    values = {"caption_table": "shards", "held_out_share": 0.0, "caption_key": caption_key, **options}
    return open_data(WebDatasetSpec(name="mine", shards=f"{folder}/*.tar", **values))


def expected(i: int) -> list[str]:
    usable = [] if i in (*MISSING, 7, 27) else [f"synthetic {i} one", f"synthetic {i} two"]
    return [f"caption {i}", *usable]


@pytest.mark.parametrize("options", [{}, {"samples_per_shard": 20}], ids=["indexed", "listed"])
def test_rows_are_found_by_key_and_missing_ones_leave_the_other_captions(
    folder: Path,
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = tmp_path / "moved"  # whose tables are not in the cache
    shutil.copytree(folder, moved)
    found = opened(moved, **options)
    assert [list(found.train.read(i).captions) for i in range(40)] == [expected(i) for i in range(40)]
    line = "2 of 20 samples have no caption in data.caption_table=shards, and their other captions are drawn"
    if options:
        assert f"{line}; further shards are not reported" in capfd.readouterr().err
        monkeypatch.setattr("clipx.data.selection.captions._reported", set[str]())
        monkeypatch.setattr("clipx.data.selection.captions._used", dict[str, str]())
        opened(moved, **options).train.read(0)
        assert line in capfd.readouterr().err, "another process, which finds the tables in the cache"
    else:
        assert any("4 of 40 samples have no caption in data.caption_table=shards" in note for note in found.notes)


def test_held_out_samples_keep_their_own_captions(folder: Path) -> None:
    found = opened(folder, held_out_share=0.25)
    assert found.held_out is not None
    assert all(len(found.held_out.read(i).captions) == 1 for i in range(10))
    assert sum(len(found.train.read(i).captions) > 1 for i in range(30)) > 20


def fingerprint(folder: Path, caption_key: Any = KEY, **options: Any) -> str:
    source: Source = opened(folder, caption_key, **options).train
    return source.fingerprint


def test_the_fingerprint_changes_with_the_texts_and_not_with_their_location(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(folder)
    shutil.copytree(folder, tmp_path / "moved")
    assert fingerprint(tmp_path / "moved") == before
    shutil.copytree(folder, tmp_path / "apart", ignore=shutil.ignore_patterns("*.tar"))
    assert fingerprint(folder, caption_table=str(tmp_path / "apart")) == before
    others = {fingerprint(folder, {"txt": 1, "table.one": 1}), fingerprint(folder, "txt", caption_table=None)}
    pq.write_table(pa.table({"key": ["000000000"], "recaption": ["another"]}), tmp_path / "apart" / "00000.parquet")
    others.add(fingerprint(folder, caption_table=str(tmp_path / "apart")))
    assert len(others | {before}) == 4
    listed = fingerprint(folder, samples_per_shard=20)
    assert listed.startswith("listed-") and listed != fingerprint(
        folder, {"txt": 1, "table.one": 1}, samples_per_shard=20
    )
