"""CSV and TSV tables of images and captions: cells, labels, bad rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers.samples import captions, encode, jpeg, picture, read_all

from clipx.data.csv import CsvSpec
from clipx.data.source import Source


def open_train(path: Path, **options: Any) -> Source:
    return CsvSpec(name="mine", path=str(path), held_out_share=0.0, **options).open().train


def write_table(folder: Path, content: str | bytes) -> Path:
    """Writes a table and, next to it, the images a.jpg, b.png and c.webp."""
    for image, kind in (("a.jpg", "JPEG"), ("b.png", "PNG"), ("c.webp", "WEBP")):
        (folder / image).write_bytes(encode(picture(20, 16, seed=len(image)), kind))
    path = folder / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def reasons(source: Source) -> list[tuple[int, str]]:
    """Returns (line, reason) of each skipped row."""
    return [(int(bad.key.rpartition(":")[2]), bad.reason) for bad in source.bad]


def test_captions_are_those_of_the_cells(tmp_path: Path) -> None:
    header = "filepath,caption\n"
    text = "filepath,caption\na.jpg,a cat\nb.png,Füße 猫\n"
    cases: list[tuple[str | bytes, dict[str, Any], list[list[str]]]] = [
        (f"{header}a.jpg,one\nb.png,other\na.jpg,two\na.jpg,three\n", {}, [["one", "two", "three"], ["other"]]),
        ("id, title ,url,image\n1, a cat ,http://x, a.jpg\n", {"image_column": "image", "caption_column": "title"}, [["a cat"]]),
        *((mark + text.replace("\n", end), {}, [["a cat"], ["Füße 猫"]]) for end in ("\n", "\r\n", "\r") for mark in ("", "\ufeff")),
        ("filepath\tcaption\na.jpg\tein Käfer\n".encode("utf-16"), {"separator": "tab"}, [["ein Käfer"]]),
        (f'{header}a.jpg,"a ""big"" cat,\nasleep"\n"b.png",plain "quotes" inside\n', {}, [['a "big" cat,\nasleep'], ['plain "quotes" inside']]),
        *((f"{header}a.jpg,a{odd}cat\n", {}, [[f"a{odd}cat"]]) for odd in "\u2028\x0b\x0c\x85\x1c"),  # no ends of lines
        (f"{header}\na.jpg,a cat\n\n\n", {}, [["a cat"]]),
        (f"{header}a.jpg,a cat,,\n", {}, [["a cat"]]),
    ]  # fmt: skip
    for content, options, expected in cases:
        source = open_train(write_table(tmp_path, content), **options)
        assert ([s.captions for s in read_all(source)], list(source.bad)) == (expected, []), repr(content)


def test_of_a_list_of_captions_the_empty_ones_are_left_out(tmp_path: Path) -> None:
    write_table(tmp_path, "")
    cells = [["one", None, " ", "two"], ["", None], []]
    pq.write_table(pa.table({"filepath": ["a.jpg", "b.png", "c.webp"], "caption": cells}), tmp_path / "t.parquet")
    source = open_train(tmp_path / "t.parquet")
    assert [sample.captions for sample in read_all(source)] == [["one", "two"]]
    assert reasons(source) == [(2, "caption is missing"), (3, "caption is missing")]


def test_a_row_with_a_conflicting_label_is_skipped(tmp_path: Path) -> None:
    path = write_table(tmp_path, "filepath,caption,class\na.jpg,x,1\na.jpg,y,2\na.jpg,z,1\n")
    source = open_train(path, label_column="class")
    assert [(s.captions, s.label) for s in read_all(source)] == [(["x", "z"], 1)]
    assert reasons(source) == [(3, "label differs from an earlier one of this image: 2, not 1")]


def test_unusable_rows_are_skipped_and_reported_by_line(tmp_path: Path) -> None:
    cases = {
        b",a caption": "image is missing",
        b"b.png,": "caption is missing",
        b"b.png, ": "caption is missing",
        b"b.png": "caption is missing",
        "b.png,café".encode("latin-1"): "caption is not UTF-8",
        "é.png,cat".encode("latin-1"): "image is not UTF-8",
        b"b.png,a big, red dog": "row has more cells than the header has columns",
    }
    source = open_train(
        write_table(tmp_path, b"\n".join([b"filepath,caption\na.jpg,a cat", *cases, b"c.webp,a bird\n"]))
    )
    assert captions(source) == ["a cat", "a bird"]
    found = reasons(source)
    assert [line for line, _ in found] == list(range(3, 3 + len(cases)))
    assert all(told.startswith(reason) for (_, told), reason in zip(found, cases.values(), strict=True)), found
    assert source.bad[0].key == f"{tmp_path}/table.csv:3"
    table = write_table(tmp_path, "filepath,caption,class\na.jpg,x,\nb.png,y,1\n")
    labelled = open_train(table, label_column="class")
    assert (captions(labelled), reasons(labelled)) == (["y"], [(2, "label is missing")])


def test_a_share_of_the_images_is_held_out_with_all_their_captions(tmp_path: Path) -> None:
    rows = [f"{i}.jpg,{word} {i}" for word in ("one", "two") for i in range(40)]
    for i in range(40):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg())
    path = write_table(tmp_path, "filepath,caption\n" + "\n".join(rows))
    data = CsvSpec(name="mine", path=str(path), held_out_share=0.25).open()
    assert data.held_out is not None
    assert (sum(data.train.sizes), sum(data.held_out.sizes)) == (30, 10)
    assert data.held_out.read(0).captions == ["one 3", "two 3"]
    assert not set(captions(data.train)) & set(captions(data.held_out))
