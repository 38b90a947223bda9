"""Weighted caption keys: which captions of a sample are drawn from, and which samples have any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.samples import jpeg, write_tar

from clipx.data.source import BadSample, Source
from clipx.data.spec import open_data
from clipx.data.webdataset import WebDatasetSpec

WEIGHTS = {"txt": 0.2, "json.caption": 0.3, "json.recaption": 0.5}


def spec(shards: Path | str, caption_key: Any, **options: Any) -> WebDatasetSpec:
    options = {"held_out_share": 0.0, **options}
    return WebDatasetSpec(name="mine", shards=str(shards), caption_key=caption_key, **options)


def open_train(shards: Path | str, caption_key: Any, **options: Any) -> Source:
    return open_data(spec(shards, caption_key, **options)).train


# -------------------------------------------------------------------------------------------------------- drawing


def test_short_captions_are_excluded_from_the_draw(tmp_path: Path) -> None:
    short = {"caption": "hi", "recaption": ["hi", "long enough json.recaption"], "label": 7}
    none = {"caption": "hi", "recaption": ["hi"], "label": 8}
    members = []
    for i, (text, meta) in enumerate([("long enough txt", short), ("hi", short), ("hi", none)]):
        members += [(f"{i}.jpg", jpeg(i)), (f"{i}.txt", text.encode()), (f"{i}.json", json.dumps(meta).encode())]
    source = open_train(write_tar(tmp_path / "a.tar", members), WEIGHTS, min_caption_chars=5, label_key="json.label")
    first, second = source.read(0), source.read(1)
    assert first.captions_by_key == [(0.5, ["long enough json.recaption"]), (0.2, ["long enough txt"])]
    assert second.captions_by_key == [(0.5, ["long enough json.recaption"])]
    assert list(first.captions) == ["long enough json.recaption", "long enough txt"]
    assert (first.label, second.label) == (7, 7), "of the JSON that has captions"
    with pytest.raises(BadSample, match=r"^caption has 2 characters, fewer than data\.min_caption_chars=5$"):
        source.read(2)


# ------------------------------------------------------------------------------------------------- sample counts


def shard_of_all_kinds(path: Path) -> Path:
    meta = json.dumps({"recaption": "json"}).encode()
    members = [
        *(("both.jpg", jpeg()), ("both.txt", b"txt"), ("both.json", meta)),
        *(("text.jpg", jpeg()), ("text.txt", b"txt")),
        *(("json.jpg", jpeg()), ("json.json", meta), ("void.jpg", jpeg()), ("void.json", meta), ("void.txt", b"")),
        *(("broken.jpg", jpeg()), ("broken.json", b"{"), ("broken.txt", b"txt")),
        *(("none.jpg", jpeg()), ("other.txt", b"no image")),
        *(("bad.jpg", jpeg()), ("bad.json", b"{}"), ("bad.txt", b"\xff")),
    ]
    return write_tar(path, members)


def test_a_sample_needs_a_caption_of_at_least_one_key(tmp_path: Path) -> None:
    shard = shard_of_all_kinds(tmp_path / "a.tar")
    source = open_train(shard, {"txt": 1, "json.recaption": 1})
    assert source.sizes == [6]
    assert [list(source.read(i).captions) for i in range(5)] == [["json", "txt"], ["txt"], ["json"], ["json"], ["txt"]]
    with pytest.raises(
        BadSample, match=r"^caption is missing: json\.recaption contains no text; caption is not UTF-8$"
    ):
        source.read(5)
    assert {Path(bad.key).name: bad.reason for bad in source.bad} == {
        "a.tar:none": "caption is missing or empty",
        "a.tar:other": "image is missing or empty",
    }
    assert open_train(shard, "txt").sizes == [4], "both, text, broken and bad: bad's encoding is checked at reading"
    assert open_train(shard, "json.recaption").sizes == [5]
    assert open_train(shard, {"json.recaption": 1, "json.x": 1}).sizes == [5]
