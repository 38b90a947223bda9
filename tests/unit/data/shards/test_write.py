"""Atomic writes, and shards that are written once."""

from __future__ import annotations

import functools
import tarfile
from pathlib import Path

import pytest
import webdataset
from helpers.samples import jpeg, read_all

from clipx.data.shards.shards import Shards
from clipx.data.shards.write import ShardSample, ensure_shards, write_samples
from clipx.data.source import Sample
from clipx.storage.local import write_atomically


def make_and_note(index: int, note: Path) -> Sample:
    """Creates a sample and touches a file named by its index."""
    (note / str(index)).touch()
    return Sample(jpeg(index), [f"caption {index}"], index)


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "made").mkdir()
    return tmp_path / "made"


def pop_created(note: Path) -> list[int]:
    """Returns the indices created since the previous call."""
    found = sorted(int(path.name) for path in note.iterdir())
    for path in note.iterdir():
        path.unlink()
    return found


@pytest.mark.usefixtures("processes")
def test_shards_are_written_once_and_a_deleted_shard_is_rewritten(note: Path) -> None:
    ensure = functools.partial(
        ensure_shards, "folder", functools.partial(make_and_note, note=note), 25, per_shard=10, what="x"
    )
    urls = ensure()
    assert pop_created(note) == list(range(25))
    assert [Path(url).name for url in urls] == [f"{k:06d}.tar" for k in range(3)]
    source = Shards.open(urls, "json.captions", "json.label")
    assert source.sizes == [10, 10, 5]
    assert read_all(source) == [Sample(jpeg(index), [f"caption {index}"], index) for index in range(25)]
    assert ensure() == urls
    assert pop_created(note) == []
    before = Path(urls[1]).read_bytes()
    Path(urls[1]).unlink()
    assert ensure() == urls
    assert pop_created(note) == list(range(10, 20))
    assert Path(urls[1]).read_bytes() == before


def test_the_same_samples_give_the_same_bytes_without_time_and_owner(tmp_path: Path) -> None:
    samples: list[ShardSample] = [{"__key__": f"{i:03d}", "txt": b"a caption", "png": jpeg(i)} for i in range(3)]
    for name in ("a.tar", "pipe:touch b.tar"):
        write_samples(str(tmp_path / name), samples)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "pipe:touch b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        facts = [(m.name, m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar.getmembers()]
    assert facts == [(f"{i:03d}.{ending}", 0, 0, 0, "", "") for i in range(3) for ending in ("png", "txt")]
    found = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    assert [(s["__key__"], s["txt"], s["png"]) for s in found] == [
        (f"{i:03d}", b"a caption", jpeg(i)) for i in range(3)
    ]


def test_an_interrupted_write_leaves_no_partial_file(tmp_path: Path) -> None:
    def fails(path: str) -> None:
        Path(path).write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", fails)
    assert list(tmp_path.iterdir()) == []
    write_atomically(tmp_path / "file", lambda path: Path(path).write_text("whole"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", fails)
    assert (tmp_path / "file").read_text() == "whole"
