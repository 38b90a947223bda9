"""Weighted caption keys: which captions of a sample are drawn from, and which samples have any; tables of captions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.samples import img2dataset, jpeg, write_tar

from clipx.data.source import BadSample, Source
from clipx.data.spec import Dataset, open_data
from clipx.data.webdataset import WebDatasetSpec

WEIGHTS = {"txt": 0.2, "json.caption": 0.3, "json.recaption": 0.5}


def spec(shards: Path | str, caption_key: Any, **options: Any) -> WebDatasetSpec:
    options = {"held_out_share": 0.0, **options}
    return WebDatasetSpec(name="mine", shards=str(shards), caption_key=caption_key, **options)


def open_train(shards: Path | str, caption_key: Any, **options: Any) -> Source:
    return open_data(spec(shards, caption_key, **options)).train


def test_short_captions_are_excluded_from_the_draw(tmp_path: Path) -> None:
    short = {"caption": "hi", "recaption": ["hi", "long enough json.recaption"], "label": 7}
    none = {"caption": "hi", "recaption": ["hi"], "label": 8}
    members = []
    for i, (text, meta) in enumerate([("long enough txt", short), ("hi", short), ("hi", none)]):
        members += [(f"{i}.jpg", jpeg(i)), (f"{i}.txt", text.encode()), (f"{i}.json", json.dumps(meta).encode())]
    source = open_train(write_tar(tmp_path / "a.tar", members), WEIGHTS, min_caption_chars=5, label_key="json.label")
    first, second = source.read(0), source.read(1)
    assert first.captions_by_key == [(0.5, ["long enough json.recaption"]), (0.2, ["long enough txt"])]
    assert second.captions_by_key == [(0.5, ["long enough json.recaption"])]
    assert list(first.captions) == ["long enough json.recaption", "long enough txt"]
    assert (first.label, second.label) == (7, 7), "of the JSON that has captions"
    with pytest.raises(BadSample, match=r"^caption has 2 characters, fewer than data\.min_caption_chars=5$"):
        source.read(2)


def shard_of_all_kinds(path: Path) -> Path:
    meta = json.dumps({"recaption": "json"}).encode()
    members = [
        *(("both.jpg", jpeg()), ("both.txt", b"txt"), ("both.json", meta)),
        *(("text.jpg", jpeg()), ("text.txt", b"txt")),
        *(("json.jpg", jpeg()), ("json.json", meta), ("void.jpg", jpeg()), ("void.json", meta), ("void.txt", b"")),
        *(("broken.jpg", jpeg()), ("broken.json", b"{"), ("broken.txt", b"txt")),
        *(("none.jpg", jpeg()), ("other.txt", b"no image")),
        *(("bad.jpg", jpeg()), ("bad.json", b"{}"), ("bad.txt", b"\xff")),
    ]
    return write_tar(path, members)


def test_a_sample_needs_a_caption_of_at_least_one_key(tmp_path: Path) -> None:
    shard = shard_of_all_kinds(tmp_path / "a.tar")
    source = open_train(shard, {"txt": 1, "json.recaption": 1})
    assert source.sizes == [6]
    assert [list(source.read(i).captions) for i in range(5)] == [["json", "txt"], ["txt"], ["json"], ["json"], ["txt"]]
    with pytest.raises(
        BadSample, match=r"^caption is missing: json\.recaption contains no text; caption is not UTF-8$"
    ):
        source.read(5)
    assert {Path(bad.key).name: bad.reason for bad in source.bad} == {
        "a.tar:none": "caption is missing or empty",
        "a.tar:other": "image is missing or empty",
    }
    assert open_train(shard, "txt").sizes == [4], "both, text, broken and bad: bad's encoding is checked at reading"
    assert open_train(shard, "json.recaption").sizes == [5]
    assert open_train(shard, {"json.recaption": 1, "json.x": 1}).sizes == [5]


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
