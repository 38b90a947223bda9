"""The data set of two Debian packages: captions of PNG text chunks and of text files, their cleaning, the shards."""

from __future__ import annotations

import csv
import io
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs import compose, run
from helpers.samples import encode, picture, read_all
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from clipx.data.openclipart.build import build
from clipx.data.openclipart.captions import clean, says_more, shared
from clipx.data.openclipart.png_text import read_texts
from clipx.data.openclipart.spec import OpenclipartSpec
from clipx.data.source import BadSample, Sample
from clipx.data.transform import decode
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPX_CACHE", str(tmp_path / "cache"))


# -------------------------------------------------------------------------------------------------- text chunks


def with_texts(image: Image.Image, **texts: str) -> bytes:
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text.encode())  # as the packages have it: UTF-8 where the format requires Latin-1
    return encode(image, "PNG", pnginfo=info)


def test_every_kind_of_text_chunk_is_read_as_pillow_reads_it() -> None:
    info = PngInfo()
    info.add_text("Title", "A café")
    info.add_text("Description", "compressed " * 50, zip=True)
    info.add_itxt("Author", "Mikoláš Aleš", "cs", "Autor")
    info.add_itxt("Comment", "日本 " * 50, zip=True)
    info.add_text("Title", "a second one")
    encoded = encode(picture(9, 7), "PNG", pnginfo=info)
    with Image.open(io.BytesIO(encoded)) as image:
        expected = {**image.info, "Title": "A café"}
    assert read_texts(encoded) == expected


def _chunk(kind: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def test_malformed_and_huge_texts_are_skipped() -> None:
    good = with_texts(picture(4, 4), Title="a dog")
    chunks = [
        _chunk(b"zTXt", b"Bomb\0\0" + zlib.compress(bytes(1 << 24))),
        _chunk(b"zTXt", b"Damaged\0\0no zlib stream"),
        _chunk(b"iTXt", b"Half\0\1"),
        _chunk(b"iTXt", b"Latin\0\0\0\0\0\xe9"),
        _chunk(b"tEXt", b"Long\0" + b"x" * 70_000),
        _chunk(b"tEXt", b"Author\0Ann"),
    ]
    texts = read_texts(good[:8] + b"".join(chunks) + good[8:])
    assert {key: texts[key] for key in ("Title", "Author")} == {"Title": "a dog", "Author": "Ann"}
    assert not {"Bomb", "Damaged", "Latin", "Long"} & set(texts)
    assert texts.get("Half", "") == ""
    for length in range(8, len(good)):
        assert set(read_texts(good[:length])) <= {"Title"}, "a truncated file has fewer texts"
    with pytest.raises(BadSample, match="^image is not PNG$"):
        read_texts(encode(picture(4, 4), "JPEG"))


# ----------------------------------------------------------------------------------------------------- captions


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
        ("Drawing by Ann - a box", "Drawing by Ann - a box"),
        ("made with love in Naples", "made with love in Naples"),
    ],
)
def test_captions_are_cleaned(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned
    assert clean(clean(text)) == cleaned


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("12 3!", "caption has no letter"),
        ("<br>", "caption has no letter"),
        ("HASH(0x85a4f2c)", "caption has no letter"),
        ("www.example.org", "caption has no letter"),
        ("contact: ann@example.org", "caption contains an e-mail address"),
        ("Created with Inkscape", "caption is a credit or a licence"),
        ("This work is hereby released into the Public Domain.", "caption is a credit or a licence"),
        ("ann Example", "caption is a credit or a licence"),
    ],
)
def test_texts_that_are_no_captions_are_dropped_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadSample, match=f"^{reason}$"):
        clean(text, author="Ann Example ")


def test_shared_captions_are_counted_once_for_each_picture() -> None:
    assert shared([["Dog", "dog"], ["DOG"], ["cat"]], most=2) == set()
    assert shared([["Dog", "dog"], ["DOG"], ["cat"]], most=1) == {"dog"}


def test_a_description_that_only_repeats_the_title_says_no_more() -> None:
    assert not says_more("Apple Pie.", ["Apple Pie (B and W)"])
    assert not says_more("A ladybug", ["ladybug"])
    assert says_more("a red ladybug", ["ladybug"])
    assert not says_more("a red ladybug", ["ladybug", "the red ladybug, flying"])


# ------------------------------------------------------------------------------------------------- the data set


def png(folder: Path, name: str, seed: int, size: tuple[int, int] = (30, 20), **texts: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(with_texts(picture(*size, seed), **texts))
    return path


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, str]:
    """Writes two folders in the layout of the packages. Returns the overrides that name them."""
    art, stamps = tmp_path / "art", tmp_path / "stamps"
    for seed in range(4):
        png(art, f"icons/theme{seed}.png", seed, Title="a theme")
    png(art, "food/pie.png", 10, Title="Apple Pie", Description="A pie with a crust")
    png(art, "food/mug.png", 11, Title="mug", Description="A mug")
    (art / "unsorted").mkdir()
    (art / "unsorted" / "mug.png").symlink_to(art / "food" / "mug.png")
    png(art, "logos/none.png", 12)
    png(art, "logos/large.png", 13, size=(60, 50), Title="a logo")
    broken = png(art, "logos/broken.png", 14, Title="a broken logo")
    broken.write_bytes(broken.read_bytes()[:-40])
    (art / "logos" / "jpeg.png").write_bytes(encode(picture(9, 9), "JPEG"))
    png(stamps, "animals/birds/hen.png", 20)
    (stamps / "animals/birds/hen.txt").write_text("\ufeffA hen.\nde.utf8=Eine Henne.\n", encoding="utf-8")
    png(stamps, "animals/birds/hen_mirror.png", 21)
    (stamps / "animals/cow.svg").write_text("<svg/>")
    return {"openclipart": str(art), "tuxpaint": str(stamps)}


def pairs(out: Path) -> list[tuple[str, str, str]]:
    with (out / "pairs.csv").open(encoding="utf-8", newline="") as file:
        return [(Path(row["filepath"]).name, row["caption"], row["label"]) for row in csv.DictReader(file)]


def samples(out: Path) -> list[Sample]:
    keys = {"caption_key": "json.captions", "label_key": "json.label"}
    return read_all(WebDatasetSpec(name="x", shards=f"{out}/*.tar", held_out_share=0.0, **keys).open().train)


def test_pictures_with_a_caption_are_written_into_shards(tmp_path: Path, packages: dict[str, Any]) -> None:
    out = tmp_path / "out"
    build(OpenclipartSpec(out=str(out), size=16, processes=1, **packages))
    assert pairs(out) == [
        ("mug.png", "mug", "food"),
        ("pie.png", "Apple Pie", "food"),
        ("pie.png", "A pie with a crust", "food"),
        ("broken.png", "a broken logo", "logos"),
        ("large.png", "a logo", "logos"),
        ("hen.png", "A hen.", "animals"),
    ]
    found = samples(out)
    assert [(list(one.captions), one.label) for one in found] == [
        (["mug"], "food"),
        (["Apple Pie", "A pie with a crust"], "food"),
        (["a logo"], "logos"),
        (["A hen."], "animals"),
    ]
    assert {decode(one.image, 10**6).size for one in found} == {(16, 16)}


def test_the_report_accounts_for_every_file(tmp_path: Path, packages: dict[str, Any]) -> None:
    out = tmp_path / "out"
    build(OpenclipartSpec(out=str(out), size=16, processes=1, **packages))
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["files"] == {"openclipart": 11, "tuxpaint": 3}
    assert report["duplicate_files"] == 1
    assert (report["pictures"], report["captions"]) == (4, 5)
    reasons = report["dropped_pictures"]
    assert {key: reasons[key] for key in reasons if "damaged" not in key and "truncated" not in key} == {
        "no caption is left": 6,
        "image is a .svg file, not PNG": 1,
        "image is not PNG": 1,
    }
    assert report["dropped_captions"] == {
        "caption of more than 3 pictures": 4,
        "caption says no more than another one of the picture": 1,
    }
    assert report["labels"] == {"animals": 1, "food": 2, "logos": 1}
    unused = sum(reasons.values()) + report["duplicate_files"]
    assert report["pictures"] + unused == sum(report["files"].values())


def test_max_shared_is_the_number_of_pictures_that_may_have_the_same_title(
    tmp_path: Path, packages: dict[str, Any]
) -> None:
    build(OpenclipartSpec(out=str(tmp_path / "out"), max_shared=4, processes=1, **packages))
    assert sum(caption == "a theme" for _, caption, _ in pairs(tmp_path / "out")) == 4


def test_files_with_the_same_bytes_are_one_picture_with_all_captions(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps"
    for name, caption in (("a", "A dog."), ("b", "A brown puppy."), ("c", "a DOG.")):
        png(stamps, f"{name}/one.png", 1)
        (stamps / name / "one.txt").write_text(caption)
    build(OpenclipartSpec(out=str(tmp_path / "out"), openclipart=None, tuxpaint=str(stamps), processes=1))
    assert pairs(tmp_path / "out") == [("one.png", "A dog.", "a"), ("one.png", "A brown puppy.", "a")]


def test_transparency_becomes_white_and_a_border_makes_a_square(tmp_path: Path) -> None:
    art = tmp_path / "art"
    rgba = np.zeros((10, 20, 4), np.uint8)
    rgba[:, :10] = (255, 0, 0, 255)
    (art / "shapes").mkdir(parents=True)
    (art / "shapes" / "half.png").write_bytes(with_texts(Image.fromarray(rgba), Title="half a box"))
    build(OpenclipartSpec(out=str(tmp_path / "out"), openclipart=str(art), tuxpaint=None, size=40, processes=1))
    (one,) = samples(tmp_path / "out")
    pixels = np.asarray(decode(one.image, 10**6)).astype(int)
    assert pixels.shape == (40, 40, 3)
    assert (pixels[20, 35] > 245).all(), "transparent"
    assert (pixels[2, 5] > 245).all(), "border"
    assert pixels[20, 5, 0] > 230
    assert (pixels[20, 5, 1:] < 30).all()


@pytest.mark.parametrize("without", ["openclipart", "tuxpaint"])
def test_one_source_suffices(tmp_path: Path, packages: dict[str, Any], without: str) -> None:
    build(OpenclipartSpec(out=str(tmp_path / "out"), processes=1, **{**packages, without: None}))
    labels = {label for _, _, label in pairs(tmp_path / "out")}
    assert labels == ({"animals"} if without == "openclipart" else {"food", "logos"})


# -------------------------------------------------------------------------------------------- repeated runs, errors


def shard_bytes(out: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(out.glob("*.tar"))]


def test_the_command_continues_and_gives_the_same_bytes(tmp_path: Path, packages: dict[str, str]) -> None:
    words = [f"{key}={value}" for key, value in packages.items()]
    command = (sys.executable, "-m", "clipx.data.openclipart", "size=16", *words)
    out = tmp_path / "out"
    printed = run(*command, f"out={out}").stdout
    assert f"train on the pictures: CLIPX_OPENCLIPART='{out}/*.tar' python -m clipx.train data=openclipart" in printed
    first, report = shard_bytes(out), (out / "report.json").read_bytes()
    (out / "00000.tar").unlink()
    (out / "00000_stats.json").unlink()
    build(OpenclipartSpec(out=str(out), size=16, processes=1, **packages))  # type: ignore[arg-type]
    assert shard_bytes(out) == first
    assert (out / "report.json").read_bytes() == report


def test_a_folder_of_other_options_is_an_error_and_stays_unchanged(tmp_path: Path, packages: dict[str, Any]) -> None:
    out = tmp_path / "out"
    build(OpenclipartSpec(out=str(out), size=16, processes=1, **packages))
    before = (out / "pairs.csv").read_bytes()
    with pytest.raises(ConfigError, match="size was 16, is 17"):
        build(OpenclipartSpec(out=str(out), size=17, processes=1, **packages))
    with pytest.raises(ConfigError, match="holds pairs of other files or options: give another folder"):
        build(OpenclipartSpec(out=str(out), size=16, max_shared=9, processes=1, **packages))
    assert (out / "pairs.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("openclipart=null", "tuxpaint=null"), "leave no picture: give one of the folders"),
        (("size=0",), "size=0 must be at least 1 pixel"),
        (("max_shared=0",), "max_shared=0 must be at least 1 picture"),
        (("processes=-1",), "processes=-1 is negative"),
        (("out=s3://bucket/x",), "out=s3://bucket/x is a URL"),
        (("tuxpaint=https://host/x",), "tuxpaint=https://host/x is a URL"),
    ],
)
def test_options_out_of_range_are_errors(options: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("out=x", *options, config_name="openclipart")


@pytest.mark.parametrize(
    ("source", "package"), [("openclipart", "openclipart-png"), ("tuxpaint", "tuxpaint-stamps-default")]
)
def test_a_missing_package_is_an_error_with_the_line_that_installs_it(
    tmp_path: Path, packages: dict[str, Any], source: str, package: str
) -> None:
    spec = OpenclipartSpec(out=str(tmp_path / "out"), **{**packages, source: "/nowhere"})
    with pytest.raises(ConfigError, match=f"^{source}=/nowhere is no folder: apt-get install {package}, or give"):
        build(spec)
    assert not (tmp_path / "out").exists()


def test_folders_without_a_caption_are_an_error(tmp_path: Path) -> None:
    png(tmp_path / "art", "a/one.png", 1)
    with pytest.raises(DataError, match="has a caption: check the folders"):
        build(OpenclipartSpec(out=str(tmp_path / "out"), openclipart=str(tmp_path / "art"), tuxpaint=None))


# ------------------------------------------------------------------------------------------------------ training


def test_the_data_option_reads_the_shards_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        png(tmp_path / "art", f"a/{seed:02d}.png", seed, Title=f"picture {seed} of a set", Description=f"text {seed}")
    out = tmp_path / "out"
    build(OpenclipartSpec(out=str(out), openclipart=str(tmp_path / "art"), tuxpaint=None, processes=1))
    monkeypatch.setenv("CLIPX_OPENCLIPART", f"{out}/*.tar")
    spec = compose("data=openclipart")
    assert list(spec.evaluator) == ["retrieval"]
    opened = spec.data.open()
    assert opened.held_out is not None
    assert (sum(opened.train.sizes), sum(opened.held_out.sizes)) == (18, 2)
    assert list(opened.train.read(0).captions) == ["picture 0 of a set", "text 0"]


def test_without_shards_the_data_option_names_the_key() -> None:
    with pytest.raises(ConfigError, match="data.shards has no value: give the shards of openclipart"):
        compose("data=openclipart", "data.shards=null").data.open()
