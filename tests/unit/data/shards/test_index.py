"""The shard index and its command: parts, changed shards, lists of shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runs import compose
from helpers.samples import img2dataset, write_tar

from clipx.data.index import main
from clipx.data.shards.index import ShardIndex, index_shards
from clipx.data.shards.tar import TXT
from clipx.data.shards.urls import expand

SIZES = [3, 0, 5, 1, 4]


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    start = 0
    for k, size in enumerate(SIZES):
        write_tar(tmp_path / "data" / f"{k:05d}.tar", img2dataset(range(start, start + size)))
        start += size
    return tmp_path / "data"


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
    seen: list[set[str]] = [set()]
    for k in (1, 2, 3):
        out = command(f"shards={shards}/*.tar", f"part={k}/3")
        assert cells(out)[:2] == [["2", "4"], ["2", "4"], ["1", "5"]][k - 1]
        assert len(cells(out)) == 4, "only the whole index prints the samples of an epoch"
        assert len(cached_files() - seen[-1]) == 3 * len(SIZES[k - 1 :: 3]), "each part indexes only its shards"
        seen.append(cached_files())
    parts = index_shards(expand(f"{shards}/*.tar", "shards"), TXT)
    assert cached_files() == seen[-1], "all shards are indexed already"
    monkeypatch.setenv("CLIPX_CACHE", str(shards.parent / "other"))
    whole = index_shards(expand(f"{shards}/*.tar", "shards"), TXT)
    assert [(i.samples, i.digest, i.bad, i.size) for i in parts] == [
        (i.samples, i.digest, i.bad, i.size) for i in whole
    ]
    for one, other in zip(parts, whole, strict=True):
        assert Path(one.table).read_bytes() == Path(other.table).read_bytes()


# ------------------------------------------------------------------------------------------------------- changes


def index_of(path: Path) -> ShardIndex:
    (found,) = index_shards([str(path)], TXT)
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
    path.write_bytes(content.replace(b"caption 3", b"caption X"))
    os.utime(path, ns=(time, time + 1_000_000))
    assert index_of(path).table != longer.table, "the same size, an mtime 1 ms later"
    os.utime(path, ns=(time, time))
    assert index_of(path).table == longer.table, "the cached index matches again at the previous size and mtime"


# --------------------------------------------------------------------------------------------------------- lists


def test_a_list_file_expands_to_shards(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# a comment", "", " 00002.tar ", f"{shards}/00000.tar", "0000{3..4}.tar", f"file://{shards}/00001.tar"]
    (shards / "list.txt").write_text("\r\n".join(lines))
    names = ["00002.tar", "00000.tar", "00003.tar", "00004.tar", "00001.tar"]
    assert [Path(url).name for url in expand(f"@{shards}/list.txt", "shards")] == names
    assert [Path(url).name for url in expand(f"@file://{shards}/list.txt", "shards")] == names
    monkeypatch.chdir(shards)
    assert [Path(url).name for url in expand("@list.txt", "shards")] == names
    (shards / "globs.txt").write_text("000*[34].tar")
    assert [Path(url).name for url in expand("00000.tar::@globs.txt", "shards")] == ["00000.tar", *names[2:4]]
    data = compose("data=webdataset", "data.shards=@list.txt", "data.held_out_share=0").data
    assert sum(data.open().train.sizes) == sum(SIZES)
