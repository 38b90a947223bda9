"""The script of examples/openclipart: captions of PNG text chunks and of text files, their cleaning, the shards."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import ROOT
from helpers.examples import load
from helpers.runs import compose, run
from helpers.samples import encode, picture, read_all
from PIL.PngImagePlugin import PngInfo

from clipx.data.source import BadSample
from clipx.data.transform import decode
from clipx.data.webdataset import WebDatasetSpec

SCRIPT = ROOT / "examples/openclipart/build.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("openclipart/build.py")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  A\n dog\t of  mine ", "A dog of mine"),
        ("Pen &amp; Pencil", "Pen & Pencil"),
        ("<b>A red</b> <!-- a\ncomment -->cat", "A red cat"),
        ("AragÃ³n", "Aragón"),
        ("L&Atilde;&copy;zard", "Lézard"),
        ("café", "café"),
        ("magnifying_glass", "magnifying glass"),
        ("zero\u200bwidth \x00\x1b", "zero width"),
        ("A dog, see http://example.org/dog.html", "A dog, see"),
        ("books.svg", "books"),
        ("Clipart by Ann Example - open box", "open box"),
        ("made with love in Naples", "made with love in Naples"),
        ("12 3!", "caption has no letter"),
        ("HASH(0x85a4f2c)", "caption has no letter"),
        ("contact: ann@example.org", "caption contains an e-mail address"),
        ("Created with Inkscape", "caption is a credit or a licence"),
        ("This work is hereby released into the Public Domain.", "caption is a credit or a licence"),
        ("ann Example", "caption is a credit or a licence"),
    ],
)
def test_captions_are_cleaned_or_dropped_with_the_reason(script: ModuleType, text: str, cleaned: str) -> None:
    try:
        found = script.clean(text, "Ann Example ")
    except BadSample as fault:
        found = str(fault)
    assert found == cleaned


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
    for words, message in (("--size", "17"), "size was 16, is 17"), (("--max-shared", "4"), "holds pairs of other"):
        failed = run(*command, "--size", "16", *words, check=False)
        assert failed.returncode == 2 and message in failed.stderr and failed.stderr.count("\n") == 1
    assert contents(out) == before


def test_the_limit_of_shared_captions_and_a_folder_that_is_left_out(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(sys.executable, str(SCRIPT), str(out), *options, "--max-shared", "4", "--tuxpaint", "none")
    assert json.loads((out / "report.json").read_text())["labels"] == {"food": 2, "icons": 4}
    monkeypatch.setenv("CLIPX_OPENCLIPART", f"{out}/*.tar")
    spec = compose("data=openclipart", "data.held_out_share=0.5", config_dir=ROOT / "examples/conf")
    opened = spec.data.open()
    assert (spec.duration, spec.data.batch_size) == ("20ep", 64), "of the recipe"
    assert list(spec.evaluator) == ["retrieval"] and opened.held_out is not None
    assert (sum(opened.train.sizes), sum(opened.held_out.sizes)) == (3, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--openclipart none --tuxpaint none", "no picture is left: give the folder of --openclipart or of --tuxpaint"),
        ("--size 0", "size=0 must be at least 1 pixel"),
        ("--max-shared 0", "--max-shared 0 must be at least 1 picture"),
        ("--processes -1", "processes=-1 is negative: give 0 for all cores, or a number"),
        ("--tuxpaint /no", "--tuxpaint /no is no folder: apt-get install tuxpaint-stamps-default, or leave it out by --tuxpaint none"),
        ("--openclipart stamps --tuxpaint none", "no picture of {}/stamps has a caption: check the folders"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_exit_code_2(
    script: ModuleType, options: tuple[str, ...], words: str, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["build.py", str(tmp_path / "out"), *options, *words.split()])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"error: {message.format(tmp_path)}\n")
    assert not (tmp_path / "out").exists()
