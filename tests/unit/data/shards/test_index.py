"""The shard index and its command: parts, changed shards, and listed numbers of samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.samples import img2dataset, read_all, write_tar

from clipx.data.shards.cache import Access
from clipx.data.shards.index import _VERSION, TXT
from clipx.data.shards.shard import Shard, index_shards
from clipx.data.shards.urls import expand
from clipx.data.source import BadSample, Source, whole_index
from clipx.data.spec import Dataset
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError
from clipx.extra.prepare.index import IndexSpec, main
from clipx.extra.prepare.index import index as index_command

SIZES = (6, 9, 5)
CHOICES = ("txt png jpg npy", "webp jpeg JSON TXT", "npy txt", "txt cls jpg jpg txt", "seg.png txt", "jpg json")


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three shards that have not been read, with a cache of its own."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    start = 0
    for k, size in enumerate(SIZES):
        write_tar(tmp_path / "shards" / f"{k:05d}.tar", img2dataset(range(start, start + size)))
        start += size
    return tmp_path / "shards"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in this process, and returns what it prints."""

    def call(*words: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["clipx-index", *words])
        main()
        return capsys.readouterr().out

    return call


def cells(output: str) -> list[str]:
    """Returns the cells of the table's data row."""
    (row,) = [line for line in output.splitlines() if line.startswith("│")]
    return [cell.strip() for cell in row.strip("│").split("│")]


def cached_files() -> set[str]:
    return {path.name for path in (Path(os.environ["CLIPX_CACHE"]) / "index").iterdir()}


def test_parts_indexed_apart_equal_the_whole_index(
    shards: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for k, numbers in ((3, range(0)), (4, range(20, 24))):
        write_tar(shards / f"{k:05d}.tar", img2dataset(numbers))
    seen: list[set[str]] = [set()]
    for k in (1, 2, 3):
        out = command(f"shards={shards}/*.tar", f"part={k}/3")
        assert cells(out)[:2] == [["2", "6"], ["2", "13"], ["1", "5"]][k - 1]
        assert len(cells(out)) == 4, "only the whole index prints the samples of an epoch"
        assert len(cached_files() - seen[-1]) == 3 * (2, 2, 1)[k - 1], "each part indexes only its shards"
        seen.append(cached_files())
    unread = [Shard(url, (TXT,), Access()) for url in expand(f"{shards}/*.tar", "shards")]
    parts = index_shards(unread)
    assert cached_files() == seen[-1], "all shards are indexed already"
    monkeypatch.setenv("CLIPX_CACHE", str(shards.parent / "other"))
    whole = index_shards(unread)
    assert [(i.samples, i.digest, i.bad, i.size) for i in parts] == [
        (i.samples, i.digest, i.bad, i.size) for i in whole
    ]
    for one, other in zip(parts, whole, strict=True):
        assert Path(one.table).read_bytes() == Path(other.table).read_bytes()


def index_of(path: Path) -> Shard:
    (found,) = index_shards([Shard(str(path), (TXT,), Access())])
    return found


def test_a_change_of_size_or_mtime_reindexes_the_shard(shards: Path) -> None:
    path = shards / "00002.tar"
    first, time = index_of(path), path.stat().st_mtime_ns
    with path.open("ab") as file:
        file.write(bytes(10240))
    os.utime(path, ns=(time, time))
    longer = index_of(path)
    assert longer.table != first.table, "another size, the same mtime"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"caption 15", b"caption XX"))
    os.utime(path, ns=(time, time + 1_000_000))
    assert index_of(path).table != longer.table, "the same size, an mtime 1 ms later"
    os.utime(path, ns=(time, time))
    assert index_of(path).table == longer.table, "the cached index matches again at the previous size and mtime"


def test_a_change_of_what_an_index_holds_raises_its_version(shards: Path) -> None:
    names = [f"{i}.{ending}" for i, endings in enumerate(CHOICES) for ending in endings.split()]
    found = index_of(write_tar(shards / "choices.tar", [(name, name.encode() * 9) for name in names]))
    held = hashlib.sha256(np.load(found.table).tobytes() + found.digest.encode() + bytes(found.skipped))
    assert (_VERSION, held.hexdigest()[:16]) == (7, "23bc29b29c19bfb9"), "raise the version, and write both here"


def open_data(folder: Path, **options: Any) -> Dataset:
    return WebDatasetSpec(name="own", shards=f"{folder}/*.tar", **{"held_out_share": 0.0, **options}).open()


def manifest_of(folder: Path) -> str:
    path = folder / "manifest.json"
    index_command(IndexSpec(shards=f"{folder}/*.tar", manifest=str(path)))
    return str(path)


def test_a_manifest_gives_the_counts_and_the_fingerprint_of_the_content(shards: Path, tmp_path: Path) -> None:
    indexed = open_data(shards).train
    expected = read_all(indexed)
    manifest = manifest_of(shards)
    listed = open_data(shards, manifest=manifest).train
    assert (listed.sizes, listed.fingerprint) == (indexed.sizes, indexed.fingerprint)
    assert read_all(listed) == expected
    moved = shards.rename(tmp_path / "moved")
    assert read_all(open_data(moved, manifest=str(moved / Path(manifest).name)).train) == expected, "found by name"


def test_a_moved_shard_whose_name_a_manifest_lists_twice_is_an_error(shards: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "others" / "00001.tar", img2dataset(range(40, 44)))
    manifest = str(tmp_path / "manifest.json")
    index_command(IndexSpec(shards=f"{shards}/*.tar::{tmp_path}/others/00001.tar", manifest=manifest))
    with pytest.raises(ConfigError, match=r"manifest.json does not list \S+/00001.tar"):
        open_data(shards.rename(tmp_path / "moved"), manifest=manifest)


def test_a_replaced_shard_is_read_by_its_own_index_in_the_next_run(shards: Path) -> None:
    assert open_data(shards, samples_per_shard=9).train.read(0).captions == ["caption 0"]
    write_tar(shards / "00000.tar", img2dataset(range(40, 48)))
    train = open_data(shards, samples_per_shard=9).train
    assert outcomes(train)[0] == [f"caption {i}" for i in range(40, 48)] + [f"caption {i}" for i in range(6, 20)]


def test_samples_are_numbered_with_those_of_held_out_shards(shards: Path, tmp_path: Path) -> None:
    options = {"samples_per_shard": 9, "held_out_share": 0.5}  # holds out the second of three shards
    train = open_data(shards, **options).train
    assert [whole_index(train, index) for index in (0, 8, 9, 17)] == [0, 8, 18, 26]
    np.save(tmp_path / "ids.npy", [3, 20])
    chosen = open_data(shards, keep=str(tmp_path / "ids.npy"), **options).train
    assert [whole_index(chosen, index) for index in range(2)] == [3, 20]
    assert [chosen.key(index) for index in range(2)] == [train.key(3), train.key(11)]


def outcomes(source: Source) -> tuple[list[str], list[str]]:
    """Returns the captions of the good samples, and the reasons of the bad ones."""
    found, bad = [], []
    for index in range(sum(source.sizes)):
        try:
            found += source.read(index).captions
        except BadSample as error:
            bad.append(str(error))
    return found, bad
