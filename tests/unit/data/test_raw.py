"""Raw sources of several files: one numbering over all files, independent of file types, processes and lost shards."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.samples import jpeg

from clipx.data.prepare.prepare import prepare
from clipx.data.prepare.spec import PrepareSpec

INSIDE = {"image_column": "image", "caption_column": "text"}
SIZES = (3, 0, 7, 2, 1)
pytestmark = pytest.mark.usefixtures("own_cache")


def write_parquet(path: Path, numbers: Sequence[int]) -> Path:
    """Writes a Parquet file with embedded images, in the layout of Hugging Face."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in numbers], kind)
    texts = pa.array([f"picture {i}" for i in numbers], pa.string())
    pq.write_table(pa.table({"image": images, "text": texts}), path, row_group_size=2)
    return path


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder of 13 samples in five files, train-00000-of-00005.parquet etc."""
    start = 0
    for k, size in enumerate(SIZES):
        write_parquet(tmp_path / "hub" / f"train-{k:05d}-of-00005.parquet", range(start, start + size))
        start += size
    return tmp_path / "hub"


def prepared_captions(source: str, out: Path, **options: Any) -> list[list[str]]:
    """Prepares the source and returns `NUMBER: CAPTION` of each sample, by shard."""
    prepare(PrepareSpec(source=source, out=str(out), **{"samples_per_shard": 4, **options}))
    return [_captions(path) for path in sorted(out.glob("*.tar"))]


def _captions(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        names = [name for name in tar.getnames() if name.endswith(".txt")]
        return [f"{int(name[:-4])}: {tar.extractfile(name).read().decode()}" for name in names]  # type: ignore[union-attr]


def expected_captions() -> list[list[str]]:
    lines = [f"{i}: picture {i}" for i in range(sum(SIZES))]
    return [lines[k : k + 4] for k in range(0, len(lines), 4)]


# ------------------------------------------------------------------------------------------------------- patterns


def test_samples_are_numbered_over_all_files(hub: Path, tmp_path: Path) -> None:
    (hub / "list.txt").write_text("# all\n" + "\n".join(path.name for path in sorted(hub.glob("*.parquet"))))
    for k, written in enumerate((f"{hub}/*.parquet", f"@{hub}/list.txt")):
        assert prepared_captions(written, tmp_path / str(k), **INSIDE) == expected_captions(), written


def test_files_of_all_types_are_combined_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths in a table are relative to the folder of the table; rows are grouped by image within a table."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.jpg").write_bytes(jpeg(i))
            (tmp_path / name / f"{i}.txt").write_text(f"{name} text {i}")
        (tmp_path / name / "t.csv").write_text(f"image,text\n0.jpg,{name} 0\n1.jpg,{name} 1\n0.jpg,{name} again\n")
    pq.write_table(pa.table({"image": ["b/1.jpg"], "text": ["c 0"]}), tmp_path / "c.parquet")
    (tmp_path / "d.tsv").write_text("image\ttext\na/0.jpg\td 0\n")
    write_parquet(tmp_path / "e.parquet", range(2))
    found = prepared_captions(f"{tmp_path}/{{a,b}}/t.csv::{tmp_path}/*.parquet::{tmp_path}/d.tsv::{tmp_path}/b", tmp_path / "out", **INSIDE)  # fmt: skip
    expected = ["a 0", "a 1", "b 0", "b 1", "c 0", "picture 0", "picture 1", "d 0", "b text 0", "b text 1"]
    assert [line for lines in found for line in lines] == [f"{i}: {text}" for i, text in enumerate(expected)]
    assert f"{tmp_path}/b holds images: its 1 tables are skipped" in capsys.readouterr().err
    with tarfile.open(tmp_path / "out" / "00000.tar") as tar:
        meta = json.load(tar.extractfile("000000002.json"))  # type: ignore[arg-type]
    assert (meta["captions"], meta["source"]) == (["b 0", "b again"], f"{tmp_path}/b/0.jpg")


# ----------------------------------------------------------------------------------------------- shard boundaries


@pytest.mark.usefixtures("processes")
def test_identical_files_give_identical_shards_and_a_lost_shard_is_rewritten(hub: Path, tmp_path: Path) -> None:
    def content(out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / out).glob("*.tar")}

    prepared_captions(str(hub), tmp_path / "a", processes=1, **INSIDE)
    prepared_captions(str(hub), tmp_path / "b", processes=2, **INSIDE)
    assert content("a") == content("b")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.tar")}
    (tmp_path / "a" / "00001_stats.json").unlink()
    (tmp_path / "a" / "00001.tar").write_bytes(b"half")
    (tmp_path / "a" / ".00001.tar.abcdef").write_bytes(b"left by a killed run")
    prepared_captions(str(hub), tmp_path / "a", **INSIDE)
    assert content("a") == content("b")
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.tar")}
    assert [name for name in times if times[name] != again[name]] == ["00001.tar"]
    assert not list((tmp_path / "a").glob(".0*"))
