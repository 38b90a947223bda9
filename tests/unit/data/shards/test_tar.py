"""Tar files: scanned as tarfile and webdataset do, with damage anywhere; written with the same bytes, whole or not at all."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import webdataset
from helpers.samples import jpeg
from hypothesis import given
from hypothesis import strategies as st
from open_clip_train.data import group_by_keys_nothrow  # type: ignore[import-untyped]
from webdataset.filters import getfirst

from clipx.data.shards.index import IMAGE, TXT
from clipx.data.shards.tar import COLUMNS, TarContent, TarSample, _TarMember, scan
from clipx.data.shards.write import ShardSample, write_samples
from clipx.storage.local import write_atomically

BLOCK = 512
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
TYPES = st.sampled_from([tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.CONTTYPE])
NAMES = st.one_of(
    st.text("abä猫 _-", min_size=1, max_size=40),
    st.integers(1, 12).map(lambda n: "folder/" * n + "x"),
    st.integers(85, 91).map("n".__mul__),
)
PLACES = st.integers(0, BLOCK - 1)
READ = st.one_of(st.integers(0, 99), st.integers(124, 135), st.integers(148, 156), st.integers(345, 500))  # fields


def changes(places: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Draws (place, byte) of changes of a header."""
    return st.lists(st.tuples(places, st.integers(0, 255)), max_size=3)


Members = Sequence[tuple[str, bytes]]


def header(name: str, kind: bytes, size: int, form: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mtime = kind, size, 12.5
    return info.tobuf(form, "utf-8", "surrogateescape")[-BLOCK:]


def with_checksum(block: bytes | bytearray) -> bytes:
    return bytes(block[:148]) + b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:])) + bytes(block[156:])


def parsed(kind: type[tarfile.TarInfo], block: bytes) -> tuple[str, int, bytes] | str:
    try:
        found = kind.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:  # type: ignore[attr-defined]
        return f"{type(error).__name__}: {error}"
    return found.name, found.size, found.type


@given(
    name=NAMES, kind=TYPES, size=st.sampled_from([0, 5, 12345, (1 << 33) - 1]), form=FORMATS, changes=changes(READ),
    valid=st.booleans(), length=st.sampled_from([BLOCK] * 8 + [0, 400]),
)  # fmt: skip
def test_a_header_gives_the_member_or_the_error_of_tarfile(
    name: str, kind: bytes, size: int, form: int, changes: Sequence[tuple[int, int]], valid: bool, length: int
) -> None:
    block = bytearray(header(name, kind, size, form))
    for place, byte in changes:
        block[place] = byte
    content = (with_checksum(block) if valid else bytes(block))[:length]
    assert parsed(_TarMember, content) == parsed(tarfile.TarInfo, content)


def archive(members: Members, form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def scanned(folder: Path, content: bytes) -> TarContent:
    path = folder / "a.tar"
    path.write_bytes(content)
    return scan(str(path), len(content), 0.0)


@st.composite
def samples(draw: st.DrawFn, repeated: bool = False) -> Members:
    """Draws the members of samples in a row, with dots in their names, other members and contents of any length.

    `repeated`: also .txt and .TXT of one sample, at which webdataset ends.
    """
    endings = ["jpg", "PNG", "jpeg", "webp", "npy", "txt", "TXT", "json", "cls", "seg.png", "pkl"]
    members = []
    for name in draw(st.lists(NAMES.map(lambda name: name.strip() or "x"), max_size=6, unique=True)):
        own = draw(st.lists(st.sampled_from(endings), min_size=1, max_size=5, unique_by=str if repeated else str.lower))
        folder, slash, base = name.rpartition("/")
        hidden = draw(st.sampled_from(("", "", "", ".", "._"))) if len(base) < 80 else ""  # USTAR has 100 bytes for it
        name = f"{folder}{slash}{hidden}{base}"
        members += [(f"{name}.{ending}", b"x" + draw(st.binary(max_size=700))) for ending in own]
    return members


@given(members=samples(), form=FORMATS)
def test_samples_are_those_of_webdataset(tmp_path: Path, members: Members, form: int) -> None:
    content = archive(members, form)
    found = scanned(tmp_path, content)
    assert found.damage is None
    ours = [
        {"__key__": sample.name} | {ending: content[at : at + size] for ending, (at, size) in sample.members.items()}
        for sample in found.samples
    ]
    theirs = [
        {ending: value for ending, value in sample.items() if ending in (*COLUMNS, "__key__")}
        for sample in webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False, empty_check=False)
    ]
    assert ours == [sample for sample in theirs if len(sample) > 1]


@given(members=samples(repeated=True), form=FORMATS)
def test_the_image_and_caption_of_a_sample_are_those_of_open_clip(tmp_path: Path, members: Members, form: int) -> None:
    content = archive(members, form)

    def chosen(sample: TarSample) -> tuple[bytes | None, ...]:
        spans = [None if "npy" in sample.read and column == IMAGE else sample.row()[column] for column in (IMAGE, TXT)]
        return tuple(None if span is None or span[1] < 0 else content[span[0] : sum(span)] for span in spans)

    files = [{"fname": name, "data": data, "__url__": ""} for name, data in members]
    theirs = [
        tuple(getfirst(sample, keys, missing_is_error=False) for keys in ("jpg;png;jpeg;webp", "txt"))
        for sample in group_by_keys_nothrow(files)
    ]
    ours = map(chosen, scanned(tmp_path, content).samples)
    assert [one for one in ours if any(one)] == [one for one in theirs if any(one)]


@given(members=samples(), form=FORMATS, data=st.data())
def test_a_cut_archive_has_the_members_before_the_cut_and_is_reported(
    tmp_path: Path, members: Members, form: int, data: st.DataObject
) -> None:
    whole = archive(members, form)
    expected = [span for sample in scanned(tmp_path, whole).samples for span in sample.members.values()]
    end = len(whole.rstrip(b"\0"))
    end += -end % BLOCK
    cut = data.draw(st.integers(0, end), "cut")
    found = scanned(tmp_path, whole[:cut])
    assert found.damage is not None
    spans = [span for sample in found.samples for span in sample.members.values()]
    assert spans == [(at, size) for at, size in expected if at + size <= cut]


@given(members=samples(), data=st.data(), changed=changes(PLACES), valid=st.booleans())
def test_any_changed_bytes_of_a_header_are_damage_and_no_error(
    tmp_path: Path, members: Members, data: st.DataObject, changed: Sequence[tuple[int, int]], valid: bool
) -> None:
    """Extended headers of all kinds are among those changed: of long names and of other characters."""
    members = [("a.jpg", b"abc"), *members]
    content = bytearray(archive(members, tarfile.PAX_FORMAT))
    blocks = [at for at in range(2 * BLOCK, len(content), BLOCK) if content[at + 257 : at + 262] == b"ustar"]
    for at in data.draw(st.lists(st.sampled_from(blocks), max_size=2), "headers") if blocks else ():
        block = bytearray(content[at : at + BLOCK])
        for place, byte in changed:
            block[place] = byte
        content[at : at + BLOCK] = with_checksum(block) if valid else block
    found = scanned(tmp_path, bytes(content))
    assert [sample.name for sample in found.samples][:1] == ["a"]
    assert found.damage is None or len(found.damage) < 300


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
