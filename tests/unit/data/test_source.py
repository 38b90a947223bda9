"""Splitting a source into train and held-out sides; parsing captions and labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.source import (
    BadRecord,
    BadSample,
    Source,
    Split,
    caption_text,
    parse_label,
    prefetch_samples,
    split,
    without_numbers,
)

SHARDS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
SHARES = st.integers(1, 999).map(lambda thousandths: thousandths / 1000)


def labels(source: Source | None) -> list[int]:
    return [] if source is None else [int(source.read(i).label) for i in range(sum(source.sizes))]  # type: ignore[arg-type]


def of_a_thousand(sizes: Sequence[int], share: float) -> tuple[Source, Source | None]:
    return split(Numbers(sizes, images=dict.fromkeys(range(1000), b"x")), share)


@given(SHARDS, SHARES)
def test_each_sample_is_on_exactly_one_side_in_order_and_in_its_shard(sizes: list[int], share: float) -> None:
    kept, held_out = of_a_thousand(sizes, share)
    held, samples = labels(held_out), sum(sizes)
    assert held == sorted(held)
    assert labels(kept) == sorted(set(range(samples)) - set(held))
    assert len(held) == math.floor(samples * Fraction(share).limit_denominator(1000))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    for side in (kept, held_out or kept):
        rest = labels(side)
        for start, size, mine in zip(starts, sizes, side.sizes, strict=True):
            assert all(start <= label < start + size for label in rest[:mine])
            rest = rest[mine:]


@given(SHARDS, SHARES, st.data())
def test_samples_are_found_on_the_side_that_has_them(sizes: list[int], share: float, data: st.DataObject) -> None:
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, sum(sizes) - 1)))), dtype=np.int64)
    for side in of_a_thousand(sizes, share):
        if isinstance(side, Split):
            found, here = side.of_side(chosen)
            own = labels(side)
            assert [own[i] for i in found] == [i for i in chosen.tolist() if i in own] == chosen[here].tolist()


def test_held_out_samples_are_spread_evenly() -> None:
    for share, held, of in ((0.05, 1, 20), (0.4, 2, 5), (0.3, 3, 10)):
        counts = Counter(label // of for label in labels(of_a_thousand([1000], share)[1]))
        assert counts == dict.fromkeys(range(1000 // of), held), share


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


def test_reasons_that_differ_only_in_numbers_are_grouped() -> None:
    size, header = "image has {} pixels, more than data.max_pixels={}", "shard has a damaged or cut header at byte {}"
    for one, other in (
        (size.format("20x30", 5), size.format("21x3,000", 7)),
        (header.format("1,024"), header.format(5)),
    ):
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


def test_share_0_and_too_few_samples_hold_nothing_out() -> None:
    for samples, share in ((100, 0.0), (19, 0.05), (9, 0.1), (0, 0.5)):
        kept, held_out = split(Numbers([samples]), share)
        assert (sum(kept.sizes), held_out) == (samples, None)


CAPTIONS: list[tuple[bytes | str, str]] = [
    (b"a cat", "a cat"),
    (b" two\nlines \r\n", "two\nlines"),
    ("Füße 猫".encode(), "Füße 猫"),
    (" a 🐈 ", "a 🐈"),
    *((text, "BadSample: caption is empty") for text in (b"", b" \n\t", "\u3000")),
    *(
        (text, "BadSample: caption is not UTF-8")
        for text in ("café".encode("latin-1"), "a cat".encode("utf-16"), "half a pair \ud83d")
    ),
]


def test_captions_are_stripped_text() -> None:
    def found(caption: bytes | str) -> str:
        try:
            return caption_text(caption)
        except BadSample as error:
            return f"BadSample: {error}"

    assert [(caption, found(caption)) for caption, _ in CAPTIONS] == CAPTIONS


def test_integer_labels_are_indices_and_other_labels_are_names() -> None:
    expected = {"3": 3, " 12\n": 12, "-1": -1, "007": 7, **{text: text for text in ("cat", "3 cats", "--5", "²")}}
    assert {text: parse_label(text) for text in expected} == expected
    for text in ("", "  ", "\n"):
        with pytest.raises(BadSample, match="label is missing"):
            parse_label(text)
