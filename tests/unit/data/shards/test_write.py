"""Atomic writes, and shards that are written once."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import webdataset
from helpers.samples import jpeg

from clipx.data.shards.write import ShardSample, write_samples
from clipx.storage.local import write_atomically


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
