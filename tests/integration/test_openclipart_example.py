"""The script of examples/openclipart: captions of PNG text chunks and of text files, the shards."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.runs import run
from helpers.samples import encode, picture, read_all
from PIL.PngImagePlugin import PngInfo

from clipx.data.transform import decode
from clipx.data.webdataset import WebDatasetSpec

SCRIPT = ROOT / "examples/openclipart/build.py"


def png(folder: Path, name: str, seed: int, **texts: str) -> Path:
    """Writes a picture with text chunks as the packages have them: UTF-8 where the format requires Latin-1."""
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text.encode())
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(picture(30, 20, seed), "PNG", pnginfo=info))
    return path


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Writes two folders in the layout of the packages. Returns the options that name them."""
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))
    art, stamps = tmp_path / "art", tmp_path / "stamps"
    for seed in range(4):
        png(art, f"icons/theme{seed}.png", seed, Title="A theme" if seed else "a THEME")
    png(art, "food/pie.png", 10, Title="Apple Pie", Description="A pie with a crème")
    png(art, "food/mug.png", 11, Title="mug", Description="A mug")
    png(art, "unsorted/mug.png", 11, Title="mug", Description="A mug")
    png(art, "logos/none.png", 12)
    cut = png(art, "logos/cut.png", 14, Title="a broken logo")
    cut.write_bytes(cut.read_bytes()[:-40])
    damaged = png(art, "logos/damaged.png", 15, Title="a damaged text")
    damaged.write_bytes(damaged.read_bytes().replace(b"a damaged text", b"A damaged text"))  # not its checksum
    (art / "logos/jpeg.png").write_bytes(encode(picture(9, 9), "JPEG"))
    for name, lines in (("hen", "\ufeffA hen.\nde=Eine Henne.\n"), ("again/hen", "a bird"), ("hen_mirror", None)):
        path = png(stamps, f"animals/{name}.png", 20 if lines else 21)
        if lines:
            path.with_suffix(".txt").write_text(lines, encoding="utf-8")
    (stamps / "animals/cow.svg").write_text("<svg/>")
    return ("--openclipart", str(art), "--tuxpaint", str(stamps), "--processes", "1")


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (*out.glob("*.tar"), out / "pairs.csv", out / "report.json")}


def test_the_script_writes_pairs_shards_and_a_report_and_continues(tmp_path: Path, options: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    command = (sys.executable, str(SCRIPT), str(out), *options)
    printed = run(*command, "--size", "16").stdout
    assert f"CLIPX_OPENCLIPART='{out}/*.tar' python -m clipx.train --config-dir examples/conf" in printed
    with (out / "pairs.csv").open(encoding="utf-8", newline="") as file:
        pairs = [(Path(row["filepath"]).name, row["caption"], row["label"]) for row in csv.DictReader(file)]
    expected = [("mug.png", "mug", "food"), ("pie.png", "Apple Pie", "food"), ("pie.png", "A pie with a crème", "food")]
    expected += [("cut.png", "a broken logo", "logos")]
    assert pairs == [*expected, ("hen.png", "a bird", "animals"), ("hen.png", "A hen.", "animals")]
    keys = {"caption_key": "json.captions", "label_key": "json.label"}
    samples = read_all(WebDatasetSpec(name="x", shards=f"{out}/*.tar", held_out_share=0.0, **keys).open().train)
    captions = [["mug"], ["Apple Pie", "A pie with a crème"], ["a bird", "A hen."]]
    assert [list(sample.captions) for sample in samples] == captions
    assert {decode(sample.image, 10**6).size for sample in samples} == {(16, 16)}
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert (report["files"], report["duplicate_files"]) == ({"openclipart": 11, "tuxpaint": 4}, 2)
    assert (report["pictures"], report["captions"], report["size"], report["max_shared"]) == (3, 5, 16, 3)
    assert report["labels"] == {"animals": 1, "food": 2}
    shared, repeated = "caption of more than 3 pictures", "caption says no more than another one of the picture"
    assert report["dropped_captions"] == {shared: 4, repeated: 1}
    reasons = report["dropped_pictures"]
    assert reasons["no caption is left"] == 6 and reasons["image is a .svg file, not PNG"] == 1
    assert reasons["image is not PNG, or its header is damaged"] == 2, "a JPEG, a wrong checksum"
    assert 3 + sum(reasons.values()) + 2 == 11 + 4, "and one that cannot be decoded"
    before = contents(out)
    (out / "00000.tar").unlink()
    (out / "00000_stats.json").unlink()
    run(*command, "--size", "16")
    assert contents(out) == before
