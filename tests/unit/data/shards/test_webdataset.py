"""WebDataset shards: captions, patterns and damage."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from helpers.samples import captions, img2dataset, jpeg, read_all, write_tar

from clipx.data.source import BadSample, Source
from clipx.data.webdataset import WebDatasetSpec
from clipx.errors import DataError


def open_train(shards: Path | str, **options: Any) -> Source:
    return WebDatasetSpec(name="mine", shards=str(shards), held_out_share=0.0, **options).open().train


def captions_or_reason(source: Source, index: int) -> object:
    """Returns captions, or the reason of a bad sample."""
    try:
        return list(source.read(index).captions)
    except BadSample as bad:
        return str(bad)


NO_TEXT = "caption is missing: json.caption contains no text"
CAPTIONS: list[tuple[bytes, str, object]] = [  # json, key, captions or the reason
    (b'{"captions": ["one", " two "]}', "json.captions", ["one", "two"]),
    (b'{"captions": ["", 7, null, "half \\ud83d", "good"]}', "json.captions", ["good"]),
    (b'{"alt.text": "with a dot"}', "json.alt.text", ["with a dot"]),
    (b'{"caption": []}', "json.caption", NO_TEXT),
    (b'{"caption": "\\ud83d"}', "json.caption", "caption is not UTF-8"),
    *((meta, "json.caption", "json cannot be read") for meta in (b"\xff\xfe{}", b"[" * 200_000)),
    (b'["caption"]', "json.caption", "json is not an object"),
]


def test_captions_are_read_from_json(tmp_path: Path) -> None:
    members = [((f"{i}.jpg", jpeg()), (f"{i}.json", meta)) for i, (meta, _, _) in enumerate(CAPTIONS)]
    shard = write_tar(tmp_path / "a.tar", [member for pair in members for member in pair])
    for i, (meta, key, expected) in enumerate(CAPTIONS):
        assert captions_or_reason(open_train(shard, caption_key=key), i) == expected, meta[:50]


def test_samples_with_the_same_name_stay_separate(tmp_path: Path) -> None:
    members = [("x.jpg", jpeg(1)), ("x.txt", b"one"), ("x.jpg", jpeg(2)), ("x.txt", b"two")]
    source = open_train(write_tar(tmp_path / "a.tar", members))
    assert captions(source) == ["one", "two"]
    assert [s.image for s in read_all(source)] == [jpeg(1), jpeg(2)]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for k in range(3):
        write_tar(tmp_path / f"{k:04d}.tar", img2dataset(range(10 * k, 10 * k + 2 + k)))
    return tmp_path


def test_patterns_expand_to_shards(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(three))
    (three / "._0000.tar").write_bytes(b"\0\5\x16\7")  # as macOS writes them
    local = open_train(f"{three}/*.tar")
    for pattern, sizes in {
        "{0000..0002}.tar": [2, 3, 4], "{0000,0002}.tar": [2, 4], "*.tar": [2, 3, 4], "000[12].tar": [3, 4],
        f"0002.tar::{three}/0000.tar": [4, 2], "{0002..0000}.tar": [4, 3, 2],
    }.items():  # fmt: skip
        for folder in (str(three), "~"):
            assert open_train(f"{folder}/{pattern}").sizes == sizes, (folder, pattern)
    far = open_train(f"file://{three}/*.tar")
    assert (far.sizes, far.fingerprint, read_all(far)) == (local.sizes, local.fingerprint, read_all(local))
    literal = write_tar(three / "set [1]" / "a.tar", img2dataset(range(2)))
    assert open_train(literal).sizes == [2], "an existing path with characters of patterns"


def test_samples_before_the_damage_are_used_and_it_is_reported_once(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "whole", img2dataset(range(10)))
    whole = shard.read_bytes()
    with tarfile.open(shard) as tar:
        members = {m.name: m for m in tar.getmembers()}
    sixth, text = members["000000005.jpg"], members["000000005.json"]
    parts = [write_tar(tmp_path / "part", img2dataset(five)).read_bytes() for five in (range(5), range(5, 10))]
    header = "shard has a damaged or cut header at byte"
    unended = "shard ends without the end-of-archive mark, so it may be cut off"
    for how, content, reason in (
        ("cut inside data", whole[: sixth.offset_data + 100], "shard is cut off inside 000000005.jpg"),
        ("cut inside a header", whole[: sixth.offset + 100], header),
        ("cut between members", whole[: sixth.offset], unended),
        ("cut after the image", whole[: text.offset], unended),
        ("damaged header", whole[: sixth.offset] + b"\xaa" * 512 + whole[sixth.offset_data :], header),
        ("damaged checksum", whole[: sixth.offset + 148] + b"999999" + whole[sixth.offset + 154 :], header),
        ("joined by cat", b"".join(parts), "shard has data after its end-of-archive mark, as tars joined by cat have"),
    ):
        path = tmp_path / f"{how}.tar"
        path.write_bytes(content)
        source = open_train(path)
        assert captions(source) == [f"caption {i}" for i in range(5)], how
        assert [record.key for record in source.bad] == [str(path)]
        found = source.bad[0].reason
        assert found.startswith(reason), how
        assert found.endswith("; 5 samples before it are used"), how


def test_a_shard_truncated_after_indexing_gives_bad_samples(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", img2dataset(range(10)))
    source = open_train(path)
    with tarfile.open(path) as tar:
        inside = tar.getmember("000000005.jpg").offset_data + 10
    os.truncate(path, inside)
    assert [source.read(i).captions for i in range(5)] == [[f"caption {i}"] for i in range(5)]
    assert [captions_or_reason(source, i) for i in (5, 9)] == ["shard is shorter than recorded in its index"] * 2
    assert source.key(9) == f"{path}:sample 9"
    source = open_train(path)
    path.unlink()
    with pytest.raises(BadSample, match="shard cannot be read: .*No such file"):
        source.read(3)


NO_LABEL = "label is missing: json.label is neither an index nor a name"
LABELS: list[tuple[str, bytes, str, object]] = [  # member, its content, key, label or the reason
    ("cls", b" 12\n", "cls", 12),
    ("cls", b"cat", "cls", "cat"),
    ("json", b'{"label": 3}', "json.label", 3),
    ("json", b'{"class": "tabby cat"}', "json.class", "tabby cat"),
    ("cls", b" ", "cls", "label is missing"),
    ("json", b'{"label": [1]}', "json.label", NO_LABEL),
]


def test_labels_are_read_from_cls_or_json(tmp_path: Path) -> None:
    members = [
        ((f"{i}.jpg", jpeg()), (f"{i}.txt", b"a cat"), (f"{i}.{ending}", content))
        for i, (ending, content, _, _) in enumerate(LABELS)
    ]
    shard = write_tar(tmp_path / "a.tar", [member for three in members for member in three])
    for i, (_, content, key, expected) in enumerate(LABELS):
        source = open_train(shard, label_key=key)
        found = captions_or_reason(source, i)
        assert (found if isinstance(found, str) else source.read(i).label) == expected, content


def test_files_that_are_no_tar_are_reported_and_other_shards_are_used(tmp_path: Path) -> None:
    for name, numbers in (("a.tar", range(3)), ("e.tar", range(3, 5))):
        write_tar(tmp_path / name, img2dataset(numbers))
    (tmp_path / "b.tar").touch()
    (tmp_path / "c.tar").write_bytes(b"<!DOCTYPE html><html>404</html>" * 40)
    (tmp_path / "d.tar").write_bytes(gzip.compress(bytes(100_000)))
    source = open_train(f"{tmp_path}/*.tar")
    assert source.sizes == [3, 0, 0, 0, 2]
    assert captions(source) == [f"caption {i}" for i in range(5)]
    found = {Path(bad.key).name: bad.reason for bad in source.bad}
    no_tar = "shard cannot be read as an uncompressed tar"
    assert {name: reason[: len(no_tar)] for name, reason in found.items()} == dict.fromkeys(
        ("b.tar", "c.tar", "d.tar"), no_tar
    )
    with pytest.raises(DataError, match=r"^1 shards, from \S+c.tar, have no sample "):
        open_train(tmp_path / "c.tar")


def test_what_is_not_read_because_of_its_name_is_noted_once(tmp_path: Path) -> None:
    members = [(f"{i}.{ending}", ending.encode()) for i in range(3) for ending in ("png", "JPG", "txt")]
    hidden = [("._0.jpg", b"x"), ("__MACOSX/._1.jpg", b"x"), (".DS_Store", b"x"), ("._1.txt", b"x")]
    data = WebDatasetSpec(name="own", shards=str(write_tar(tmp_path / "a.tar", [*hidden, *members]))).open()
    assert [sample.image for sample in read_all(data.train)] == [b"JPG"] * 3
    assert data.train.bad == []
    assert data.notes == [
        f"1 × 2 hidden images are not read: macOS writes ._ files; rename other images: {tmp_path}/a.tar:._0.jpg",
        "1 × 3 samples have several images, of which the first in the order jpg, png, jpeg, webp, npy is read: "
        f"{tmp_path}/a.tar:0",
    ]
