"""Splitting a source into train and held-out sides; parsing captions and labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.source import (
    Source,
    split,
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


def test_held_out_samples_are_spread_evenly() -> None:
    for share, held, of in ((0.05, 1, 20), (0.4, 2, 5), (0.3, 3, 10)):
        counts = Counter(label // of for label in labels(of_a_thousand([1000], share)[1]))
        assert counts == dict.fromkeys(range(1000 // of), held), share
