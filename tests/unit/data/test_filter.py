"""Limits on captions and images: samples below a limit are bad, and a run reports the counts by reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs import VIT, compose, events, rows
from helpers.samples import Numbers, encode, img2dataset, picture, write_tar

from clipx.data.filter import Filtered
from clipx.data.source import BadSample, Sample
from clipx.data.spec import Dataset, DataSpec, open_data
from clipx.trainer.trainer import Trainer


def reason(source: Filtered, index: int) -> str | None:
    try:
        source.read(index)
    except BadSample as fault:
        return str(fault)
    return None


def test_an_image_with_a_side_below_the_limit_is_a_bad_sample() -> None:
    sizes = [(20, 16), (16, 20), (19, 17), (17, 17), (40, 16)]
    small = "image has {} pixels, a side below data.min_side=17"
    for kind in ("JPEG", "PNG", "WEBP"):
        images = {i: encode(picture(*size), kind) for i, size in enumerate(sizes)} | {5: b"GIF89a", 6: b"\xff\xd8\xff"}
        told = [reason(Filtered(Numbers([7], images=images), 0, 17), i) for i in range(7)]
        good_and_damaged = [None, None, small.format("40x16"), None, None]
        assert told == [small.format("20x16"), small.format("16x20"), *good_and_damaged], kind
    assert reason(Filtered(Numbers([3], broken=frozenset({1})), 1000, 1000), 1) == "broken on purpose"


def test_only_sufficiently_long_captions_of_a_sample_remain() -> None:
    source = Numbers([101])  # sample 7 has the captions `7` and `number 7`
    assert Filtered(source, 2, 0).read(7).captions == ["number 7"]
    assert Filtered(source, 2, 0).read(77).captions == ["77", "number 77"]
    assert reason(Filtered(source, 9, 0), 7) == "caption has 8 characters, fewer than data.min_caption_chars=9"
    assert reason(Filtered(source, 9, 0), 77) is None


def test_held_out_samples_are_not_filtered() -> None:
    class Both(DataSpec):
        def open(self) -> Dataset:
            return Dataset(Numbers([3]), Numbers([2]), None)

    opened = open_data(Both(kind="x", name="x", min_side=17))
    assert reason(opened.train, 0) and isinstance(opened.held_out, Numbers)  # type: ignore[arg-type]
    assert isinstance(open_data(Both(kind="x", name="x")).train, Numbers), "no filter is applied without a limit"


def test_prefetch_is_forwarded_to_the_source() -> None:
    forwarded: list[Any] = []

    class Prefetching(Numbers):
        def prefetch(self, indices: Any, later: Any = (), done: Any = ()) -> None:
            forwarded.append((indices, later, done))

    Filtered(Prefetching([3]), 1, 1).prefetch([0, 2], [1], [2])
    assert forwarded == [([0, 2], [1], [2])]


def test_a_run_counts_bad_samples_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = img2dataset(range(80))
    for i, (name, _) in enumerate(members):
        if name in ("000000003.jpg", "000000004.jpg"):
            members[i] = (name, encode(picture(12 + i % 2, 30), "JPEG"))
        if name == "000000005.txt":
            members[i] = (name, b"hi")
        if name == "000000006.jpg":
            members[i] = (name, b"no picture")
    write_tar(tmp_path / "0.tar", members)
    spec = compose(
        *VIT, "data=webdataset", f"data.shards={tmp_path}/0.tar", "data.held_out_share=0", "data.min_side=16",
        "data.min_caption_chars=3", "data.batch_size=16", "data.workers=0", "duration=2ep", "schedule.warmup=0st",
        "logger=[]", "evaluator=[]", f"run_dir={tmp_path}/run",
    )  # fmt: skip
    Trainer(spec).fit()
    found = {event["reason"]: event for event in events(tmp_path / "run") if event["event"] == "bad_samples"}
    counts = {reason: event["draws"] for reason, event in found.items()}
    assert set(counts) == {
        "image has … pixels, a side below data.min_side=…",
        "caption has … characters, fewer than data.min_caption_chars=…",
        "image is text, not JPEG, PNG or WebP",
    }
    assert counts["image has … pixels, a side below data.min_side=…"] >= 4, "two samples in each of two epochs"
    assert rows(tmp_path / "run")[-1]["train/bad_samples"] == sum(counts.values())
    printed = capsys.readouterr().out
    assert [event["samples"] for event in found.values()] == [2, 1, 1], "each sample counts once"
    small = "image has … pixels, a side below data.min_side=…"
    assert f"bad      2 samples, drawn {counts[small]} times: {small}" in printed
    assert len((tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()) == 4


def test_each_source_of_a_mixture_has_separate_limits(tmp_path: Path) -> None:
    add = "+data@data.sources."
    spec = compose("data=mixture", f"{add}a=shapes", f"{add}b=shapes", "data.sources.a.samples=64",
                   "data.sources.a.held_out_samples=16", "data.sources.b.samples=64",
                   "data.sources.b.held_out_samples=16", "data.sources.b.min_side=99")  # fmt: skip
    train = spec.data.open().train
    assert isinstance(train.read(0), Sample)
    with pytest.raises(BadSample, match="below data.min_side=99"):
        train.read(64)
