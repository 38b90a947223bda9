"""CSV and TSV tables of images and captions: rows, labels, bad rows, bad tables, held-out sides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import compose
from helpers.samples import captions, encode, jpeg, picture, read_all

from clipx.data.csv import CsvSpec
from clipx.data.order import Order
from clipx.data.source import BadSample, Source
from clipx.data.transform import decode
from clipx.errors import ConfigError, DataError
from clipx.trainer.trainer import Trainer


def spec(path: Path | str | None, **options: Any) -> CsvSpec:
    return CsvSpec(name="mine", path=None if path is None else str(path), **options)


def open_train(path: Path, **options: Any) -> Source:
    return spec(path, held_out_share=0.0, **options).open().train


def write_table(folder: Path, content: str | bytes, name: str = "table.csv") -> Path:
    """Writes a table and, next to it, the images a.jpg, b.png, c.webp and sub/d.jpg."""
    (folder / "sub").mkdir(exist_ok=True)
    for image, kind in (("a.jpg", "JPEG"), ("b.png", "PNG"), ("c.webp", "WEBP"), ("sub/d.jpg", "JPEG")):
        (folder / image).write_bytes(encode(picture(20, 16, seed=len(image)), kind))
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def reasons(source: Source) -> list[tuple[int, str]]:
    """Returns (line, reason) of each skipped row."""
    return [(int(bad.key.rpartition(":")[2]), bad.reason) for bad in source.bad]


# ------------------------------------------------------------------------------------------------------ rows


def test_each_row_gives_an_image_with_its_caption(tmp_path: Path) -> None:
    path = write_table(tmp_path, "filepath,caption\na.jpg,a cat\nb.png,a dog\nc.webp,a bird\nsub/d.jpg,a fish\n")
    source = open_train(path)
    assert captions(source) == ["a cat", "a dog", "a bird", "a fish"]
    assert [s.label for s in read_all(source)] == [None] * 4
    assert all(decode(s.image, 10**6).size == (20, 16) for s in read_all(source))
    assert [source.key(i) for i in range(4)] == [str(tmp_path / n) for n in ("a.jpg", "b.png", "c.webp", "sub/d.jpg")]
    assert source.bad == []


def test_paths_are_relative_to_the_table_or_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path, f"filepath,caption\n{tmp_path}/a.jpg,absolute\n./sub/../b.png,relative\n")
    monkeypatch.chdir("/")
    assert [len(s.image) > 100 for s in read_all(open_train(path))] == [True, True]
    monkeypatch.chdir(tmp_path)
    assert len(read_all(open_train(Path("table.csv")))) == 2


def test_a_tilde_expands_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, "filepath,caption\na.jpg,a cat\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert captions(open_train(Path("~/table.csv"))) == ["a cat"]


@pytest.mark.parametrize(
    ("separator", "character"),
    [
        *((",", ","), (";", ";"), ("\t", "\t"), ("\\t", "\t"), ("|", "|"), (" ", " ")),
        *(("comma", ","), ("semicolon", ";"), ("tab", "\t"), ("pipe", "|")),
    ],
)
def test_separators_are_characters_or_names(tmp_path: Path, separator: str, character: str) -> None:
    path = write_table(tmp_path, f"filepath{character}caption\na.jpg{character}cat\n")
    assert captions(open_train(path, separator=separator)) == ["cat"]


@pytest.mark.parametrize("value", ["tab", r"\t", "'\";\"'"])
def test_separators_can_be_given_as_overrides(tmp_path: Path, value: str) -> None:
    character = {"tab": "\t", "semicolon": ";", "comma": ",", "pipe": "|", r"\t": "\t"}.get(value, ";")
    path = write_table(tmp_path, f"filepath{character}caption\na.jpg{character}cat\n")
    value = value.strip("'")
    data = compose("data=csv", f"data.path='{path}'", f"data.separator={value}", "data.held_out_share=0").data
    assert captions(data.open().train) == ["cat"]


def test_columns_can_have_any_name_and_position(tmp_path: Path) -> None:
    path = write_table(tmp_path, "id, title ,url,image\n1, a cat ,http://x, a.jpg\n")
    assert captions(open_train(path, image_column="image", caption_column="title")) == ["a cat"]


def test_rows_of_the_same_image_are_merged_into_its_captions(tmp_path: Path) -> None:
    source = open_train(write_table(tmp_path, "filepath,caption\na.jpg,one\nb.png,other\na.jpg,two\na.jpg,three\n"))
    assert [s.captions for s in read_all(source)] == [["one", "two", "three"], ["other"]]
    assert sum(source.sizes) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_all_line_endings_and_byte_order_marks_are_read(tmp_path: Path, end: str, mark: str) -> None:
    source = open_train(
        write_table(tmp_path, mark + end.join(["filepath,caption", "a.jpg,a cat", "b.png,Füße 猫", ""]))
    )
    assert captions(source) == ["a cat", "Füße 猫"]


def test_a_table_in_utf16_is_read(tmp_path: Path) -> None:
    assert captions(
        open_train(write_table(tmp_path, "filepath\tcaption\na.jpg\tein Käfer\n".encode("utf-16")), separator="tab")
    )


def test_quoted_cells_may_contain_separators_quotes_and_newlines(tmp_path: Path) -> None:
    path = write_table(tmp_path, 'filepath,caption\na.jpg,"a ""big"" cat,\nasleep"\n"b.png",plain "quotes" inside\n')
    assert captions(open_train(path)) == ['a "big" cat,\nasleep', 'plain "quotes" inside']


@pytest.mark.parametrize("odd", ["\u2028", "\x0b", "\x0c", "\x85", "\x1c"])
def test_only_newlines_end_a_row(tmp_path: Path, odd: str) -> None:
    assert captions(open_train(write_table(tmp_path, f"filepath,caption\na.jpg,a{odd}cat\n"))) == [f"a{odd}cat"]


def test_empty_lines_are_skipped(tmp_path: Path) -> None:
    source = open_train(write_table(tmp_path, "filepath,caption\n\na.jpg,a cat\n\n\n"))
    assert (captions(source), list(source.bad)) == (["a cat"], [])


# ---------------------------------------------------------------------------------------------------- labels


def test_labels_are_indices_or_names(tmp_path: Path) -> None:
    path = write_table(tmp_path, "filepath,caption,class\na.jpg,x,3\nb.png,y,tabby cat\nc.webp,z, 0 \n")
    assert [s.label for s in read_all(open_train(path, label_column="class"))] == [3, "tabby cat", 0]


def test_a_row_without_a_label_is_skipped(tmp_path: Path) -> None:
    source = open_train(write_table(tmp_path, "filepath,caption,class\na.jpg,x,\nb.png,y,1\n"), label_column="class")
    assert captions(source) == ["y"]
    assert reasons(source) == [(2, "label is missing")]


def test_a_row_with_a_conflicting_label_is_skipped(tmp_path: Path) -> None:
    path = write_table(tmp_path, "filepath,caption,class\na.jpg,x,1\na.jpg,y,2\na.jpg,z,1\n")
    source = open_train(path, label_column="class")
    assert [(s.captions, s.label) for s in read_all(source)] == [(["x", "z"], 1)]
    assert reasons(source) == [(3, "label differs from an earlier one of this image: 2, not 1")]


# --------------------------------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b",a caption", "image is missing"),
        (b"b.png,", "caption is missing"),
        (b"b.png, ", "caption is missing"),
        (b"b.png", "caption is missing"),
        ("b.png,café".encode("latin-1"), "caption is not UTF-8"),
        ("é.png,cat".encode("latin-1"), "image is not UTF-8"),
        (b"b.png,a big, red dog", "row has more cells than the header has columns"),
    ],
)
def test_an_unusable_row_is_skipped_and_reported_by_line(tmp_path: Path, row: bytes, reason: str) -> None:
    source = open_train(write_table(tmp_path, b"filepath,caption\na.jpg,a cat\n" + row + b"\nc.webp,a bird\n"))
    assert captions(source) == ["a cat", "a bird"]
    ((line, told),) = reasons(source)
    assert line == 3 and told.startswith(reason)
    assert source.bad[0].key == f"{tmp_path}/table.csv:3"


def test_extra_empty_cells_are_ignored(tmp_path: Path) -> None:
    assert captions(open_train(write_table(tmp_path, "filepath,caption\na.jpg,a cat,,\n"))) == ["a cat"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone.jpg", "No such file"), ("sub", "Is a directory"), ("a\0.jpg", "null"), ("x" * 300, "File name too long")],
)
def test_an_unreadable_image_is_a_bad_sample(tmp_path: Path, name: str, reason: str) -> None:
    source = open_train(write_table(tmp_path, f"filepath,caption\n{name},a cat\nb.png,a dog\n"))
    with pytest.raises(BadSample, match=f"image cannot be read: .*{reason}"):
        source.read(0)
    assert source.key(0) == f"{tmp_path}/{name}"
    assert source.read(1).captions == ["a dog"]


def test_an_oversized_image_file_is_a_bad_sample(tmp_path: Path) -> None:
    source = open_train(write_table(tmp_path, "filepath,caption\nhuge.jpg,a cat\n"))
    with (tmp_path / "huge.jpg").open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)  # a sparse file that takes no disk space
    with pytest.raises(BadSample, match="image is larger than 256 MiB"):
        source.read(0)


# ---------------------------------------------------------------------------------------------------- bad tables


def test_an_unclosed_quote_raises_an_error_with_its_line(tmp_path: Path) -> None:
    rows = "".join(f"a.jpg,caption {i}\n" for i in range(10_000))
    with pytest.raises(DataError, match=r"table.csv:\d+ cannot be read .*: look for an unclosed quote"):
        open_train(write_table(tmp_path, f'filepath,caption\na.jpg,"never closed\n{rows}'))


@pytest.mark.parametrize("content", [jpeg(), bytes(range(256)) * 20, b"\0" * 1000, b"PAR1" + b"\0\xff" * 500])
def test_a_binary_file_as_table_raises_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises((ConfigError, DataError), match=r"table.csv"):
        open_train(write_table(tmp_path, content))


def test_rows_of_other_image_formats_are_bad_before_any_is_read(tmp_path: Path) -> None:
    content = "filepath,caption\na.jpg,a cat\nlogo.SVG,a logo\nclip.gif,a clip\nb.png,a dog\n"
    path = write_table(tmp_path, content)
    source = open_train(path)
    assert captions(source) == ["a cat", "a dog"]
    assert reasons(source) == [
        (3, "image is a .svg file, not JPEG, PNG or WebP"),
        (4, "image is a .gif file, not JPEG, PNG or WebP"),
    ]
    fewer = write_table(tmp_path, content.replace("clip.gif", "c.webp"), "fewer.csv")
    assert open_train(fewer).fingerprint != source.fingerprint


def test_a_table_with_too_many_images_of_other_formats_is_refused_before_training(tmp_path: Path) -> None:
    lines = [f"{i}.svg,a logo" if i % 4 == 0 else f"{i}.jpg,a photo" for i in range(1000)]
    path = write_table(tmp_path, "filepath,caption\n" + "\n".join(lines))
    options = ("data.held_out_share=0", "evaluator=[]", "logger=[]", f"run_dir={tmp_path}/run")
    spec = compose("data=csv", f"data.path={path}", *options)
    with pytest.raises(DataError) as caught:
        Trainer(spec)
    assert str(caught.value) == (
        "250 of 1,000 samples are bad, more than data.max_bad_share=0.1 (250 × image is a .svg file, not JPEG, PNG or "
        f"WebP: {path}:2 …): convert, correct or remove them, or raise the limit"
    )


# ---------------------------------------------------------------------------------------------------- held out


def test_a_separate_table_can_be_held_out(tmp_path: Path) -> None:
    train = write_table(tmp_path, "filepath,caption\na.jpg,a cat\nb.png,a dog\n")
    test = write_table(tmp_path, "filepath,caption\nc.webp,a bird\n", "test.csv")
    data = spec(train, held_out_path=str(test)).open()
    assert data.held_out is not None
    assert (captions(data.train), captions(data.held_out)) == (["a cat", "a dog"], ["a bird"])


def test_a_share_of_the_images_is_held_out_with_all_their_captions(tmp_path: Path) -> None:
    rows = [f"{i}.jpg,{word} {i}" for word in ("one", "two") for i in range(40)]
    for i in range(40):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg())
    data = spec(write_table(tmp_path, "filepath,caption\n" + "\n".join(rows)), held_out_share=0.25).open()
    assert data.held_out is not None
    assert (sum(data.train.sizes), sum(data.held_out.sizes)) == (30, 10)
    assert data.held_out.read(0).captions == ["one 3", "two 3"]
    assert not set(captions(data.train)) & set(captions(data.held_out))


def test_rows_of_a_long_table_are_shuffled_beyond_the_window(tmp_path: Path) -> None:
    source = open_train(write_table(tmp_path, "filepath,caption\n" + "\n".join(f"{i}.jpg,x" for i in range(2050))))
    assert sum(source.sizes) == 2050
    order = Order(source.sizes, seed=0, window=200)
    first = [order(p) for p in range(200)]
    assert max(first) - min(first) > 400  # contiguous blocks would span 200 rows at most


def test_the_fingerprint_depends_on_the_table_and_its_columns(tmp_path: Path) -> None:
    path = write_table(tmp_path, "filepath,caption,other\na.jpg,a cat,x\n")
    before = open_train(path).fingerprint
    assert open_train(path, caption_column="other").fingerprint != before
    copy = write_table(tmp_path, path.read_bytes(), "copy.csv")
    assert open_train(copy).fingerprint == before
    copy.write_text("filepath,caption,other\na.jpg,a bat,x\n")
    assert open_train(copy).fingerprint != before
