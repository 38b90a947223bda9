"""Splitting a source into train and held-out sides; parsing captions and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from helpers.samples import Numbers

from clipx.data.source import (
    BadRecord,
    BadSample,
    Source,
    caption_text,
    check_held_out_share,
    parse_label,
    prefetch_samples,
    split,
    without_numbers,
)
from clipx.errors import ConfigError

SIZES = [[1000], [0, 7, 0, 993], [10] * 100, [333, 1, 666]]


def labels(source: Source | None) -> list[int | str | None]:
    assert source is not None
    return [source.read(i).label for i in range(sum(source.sizes))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("share", [0.05, 0.3, 1 / 3, 0.5, 0.001])
def test_each_sample_is_on_exactly_one_side_in_order_and_in_its_shard(sizes: list[int], share: float) -> None:
    kept, held_out = split(Numbers(sizes, images=dict.fromkeys(range(1000), b"x")), share)
    assert labels(kept) == sorted(set(range(1000)) - set(labels(held_out)))
    assert labels(held_out) == sorted(labels(held_out))
    assert len(labels(held_out)) == math.floor(1000 * Fraction(share).limit_denominator(1000))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    for side in (kept, held_out):
        assert side is not None and len(side.sizes) == len(sizes)
        rest = labels(side)
        for start, size, mine in zip(starts, sizes, side.sizes, strict=True):
            assert all(start <= label < start + size for label in rest[:mine])
            rest = rest[mine:]


@pytest.mark.parametrize(("share", "held", "of"), [(0.05, 1, 20), (0.4, 2, 5), (0.3, 3, 10)])
def test_held_out_samples_are_spread_evenly(share: float, held: int, of: int) -> None:
    _, held_out = split(Numbers([1000], images=dict.fromkeys(range(1000), b"x")), share)
    for start in range(0, 1000, of):
        assert sum(start <= label < start + of for label in labels(held_out)) == held


def test_a_side_uses_the_sample_keys_of_the_source() -> None:
    for side in split(Numbers([100]), 0.3):
        assert side is not None
        assert all(side.key(i) == f"sample {side.read(i).label}" for i in range(sum(side.sizes)))


def test_prefetch_of_a_side_is_forwarded_to_the_source() -> None:
    heard: list[list[list[int]]] = []

    class Listening(Numbers):
        def prefetch(self, indices: Sequence[int], later: Sequence[int] = (), done: Sequence[int] = ()) -> None:
            heard.append([list(indices), list(later), list(done)])

    source = Listening([100], images=dict.fromkeys(range(100), b"x"))
    for side in split(source, 0.3):
        assert side is not None
        prefetch_samples(side, [0, 5, 9], [7], [1, 2])
        assert heard.pop() == [[side.read(i).label for i in some] for some in ((0, 5, 9), (7,), (1, 2))]
    prefetch_samples(split(Numbers([100]), 0.3)[0], [0])  # a source without prefetch is accepted


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "image has 20x30 pixels, more than data.max_pixels=5",
            "image has 21x3,000 pixels, more than data.max_pixels=7",
        ),
        ("shard has a damaged or cut header at byte 1,024", "shard has a damaged or cut header at byte 5"),
    ],
)
def test_reasons_that_differ_only_in_numbers_are_grouped(one: str, other: str) -> None:
    assert without_numbers(one) == without_numbers(other) != without_numbers("image is empty")


def test_each_side_and_share_has_a_distinct_fingerprint() -> None:
    source = Numbers([100])
    sides = [side for share in (0.1, 0.2, 0.3) for side in split(source, share) if side is not None]
    assert len({source.fingerprint, *(side.fingerprint for side in sides)}) == 7
    changed = split(Numbers([100], fingerprint="other"), 0.1)
    assert changed[0].fingerprint != sides[0].fingerprint


def test_a_bad_record_belongs_to_only_one_side() -> None:
    kept, held_out = split(Numbers([100], bad=[BadRecord("a", "b")]), 0.1)
    assert held_out is not None
    assert [*kept.bad, *held_out.bad] == [BadRecord("a", "b")]


@pytest.mark.parametrize(("samples", "share"), [(100, 0.0), (19, 0.05), (9, 0.1), (0, 0.5)])
def test_share_0_and_too_few_samples_hold_nothing_out(samples: int, share: float) -> None:
    kept, held_out = split(Numbers([samples]), share)
    assert held_out is None
    assert sum(kept.sizes) == samples


@pytest.mark.parametrize("share", [-0.1, 0.51, 1.0, math.nan])
def test_a_share_out_of_range_raises_an_error(share: float) -> None:
    with pytest.raises(ConfigError, match=r"data.held_out_share=.* must be in \[0, 0.5\]"):
        check_held_out_share(share)


@pytest.mark.parametrize(
    ("caption", "text"),
    [(b"a cat", "a cat"), (b" two\nlines \r\n", "two\nlines"), ("Füße 猫".encode(), "Füße 猫"), (" a 🐈 ", "a 🐈")],
)
def test_surrounding_whitespace_of_a_caption_is_stripped(caption: bytes | str, text: str) -> None:
    assert caption_text(caption) == text


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        (b"", "caption is empty"),
        (b" \n\t", "caption is empty"),
        ("\u3000", "caption is empty"),
        ("café".encode("latin-1"), "caption is not UTF-8"),
        ("a cat".encode("utf-16"), "caption is not UTF-8"),
        ("half a pair \ud83d", "caption is not UTF-8"),
    ],
)
def test_an_empty_or_non_utf8_caption_is_a_bad_sample(caption: bytes | str, reason: str) -> None:
    with pytest.raises(BadSample, match=f"^{reason}$"):
        caption_text(caption)


@pytest.mark.parametrize(
    ("text", "label"),
    [("3", 3), (" 12\n", 12), ("-1", -1), ("007", 7), ("cat", "cat"), ("3 cats", "3 cats"), ("--5", "--5"), ("²", "²")],
)
def test_integer_labels_are_indices_and_other_labels_are_names(text: str, label: int | str) -> None:
    assert parse_label(text) == label


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_an_empty_label_is_a_bad_sample(text: str) -> None:
    with pytest.raises(BadSample, match="label is missing"):
        parse_label(text)
