"""Text that people write: every reader takes every encoding and end of lines, and names the line that it cannot read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from helpers.samples import jpeg
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.class_names import read_names, read_templates
from clipx.data.csv import CsvSpec
from clipx.data.selection.files import Reading, read_ids
from clipx.data.selection.tables import ids_of
from clipx.data.shards.urls import expand
from clipx.data.source import BadSample
from clipx.errors import ClipxError
from clipx.extra.curate.entries import read_entries
from clipx.extra.prepare.command import PrepareSpec
from clipx.extra.prepare.raw import open_raw
from clipx.storage.files import decode, lines, open_lines

WRITTEN = ["Füße", "猫 \u2028 x\x85y", "last"]  # as text, the second has no end of a line


def names(path: Path) -> object:
    return list(read_names(str(path), "x"))


def templates(path: Path) -> object:
    return [line.removesuffix(" {}") for line in read_templates(str(path), "x")]


def entries(path: Path) -> object:
    return list(read_entries(str(path)).texts)


def urls(path: Path) -> object:
    return [Path(url).name for url in expand(f"@{path}", "data.shards", "shard")]


def ids(path: Path) -> object:
    import pyarrow as pa

    found = read_ids(str(path), "data.keep", Reading(3, 0.0, path.parent)).ids
    assert found is not None
    return [text for text, at in zip(WRITTEN, found.find(ids_of(pa.array(WRITTEN), "key", "")), strict=True) if at >= 0]


def table(path: Path) -> object:
    source = CsvSpec(path=str(path), held_out_share=0.0).open().train
    return [captions[0] for captions in source.captions]  # type: ignore[attr-defined]


def caption_files(path: Path) -> object:
    folder = path.parent / "images"
    folder.mkdir(exist_ok=True)
    (folder / "a.jpg").write_bytes(jpeg())
    (folder / "a.txt").write_bytes(path.read_bytes())
    ((_, read),) = open_raw(PrepareSpec(source=str(folder), out="out")).ranges[0].samples()
    return list(read().captions)


READERS = {
    **dict.fromkeys((names, entries, urls, ids, caption_files), "TEXT"), templates: "TEXT {}", table: "NUMBER.jpg,TEXT"
}  # fmt: skip


def write(path: Path, form: str, encoding: str, end: str) -> Path:
    header = ["filepath,caption"] if "," in form else []
    rows = [form.replace("NUMBER", str(number)).replace("TEXT", text) for number, text in enumerate(WRITTEN)]
    path.write_bytes("".join(f"{row}{end}" for row in [*header, *rows]).encode(encoding))
    return path


@pytest.mark.parametrize("reader", READERS, ids=[reader.__name__ for reader in READERS])
def test_every_reader_takes_every_encoding_and_end_of_lines(reader: object, tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        for end in ("\n", "\r\n", "\r"):
            path = write(tmp_path / "written.txt", READERS[reader], encoding, end)  # type: ignore[index]
            assert reader(path) == WRITTEN, (encoding, end)  # type: ignore[operator]


@pytest.mark.parametrize("reader", READERS, ids=[reader.__name__ for reader in READERS])
def test_what_is_not_unicode_is_an_error_or_counted(reader: object, tmp_path: Path) -> None:
    path = tmp_path / "written.txt"
    path.write_bytes("filepath,caption\n1.jpg,one\n2.jpg,Füße {}\n".encode("latin-1"))
    if reader is table:
        (bad,) = CsvSpec(path=str(path), held_out_share=0.0).open().train.bad
        assert (bad.key, bad.reason) == (f"{path}:3", "caption is not UTF-8")
        return
    with pytest.raises((ClipxError, BadSample), match="is not UTF-8"):
        reader(path)  # type: ignore[operator]


@given(
    text=st.text("ab \r\n\x0b\x1c\x85\u2028é猫"), encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])
)
def test_lines_are_those_of_python_in_text_mode(text: str, encoding: str) -> None:
    encoded = text.encode(encoding)
    expected = list(io.TextIOWrapper(io.BytesIO(encoded), encoding, newline=None))
    assert lines(encoded) == ([line.removesuffix("\n") for line in expected] or [""])
    assert list(open_lines(io.BufferedReader(io.BytesIO(encoded)))) == expected  # type: ignore[arg-type]


def test_a_text_that_cannot_be_read_is_named_with_its_line() -> None:
    for encoded, reason in (
        (b"a\r\nb\xe9", "line 2 is not UTF-8: save it as UTF-8"),
        ("a\nb".encode("utf-16-le"), "line 1 has a null character, as UTF-16 without a byte order mark"),
        ("ab".encode("utf-16")[:-1], "is not UTF-16"),
    ):
        with pytest.raises(ValueError, match=reason):
            decode(encoded)
