"""Splitting a source into train and held-out sides; opening data on all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.source import Source, split
from clipx.data.spec import Dataset, DataSpec, open_on_all_ranks
from clipx.distributed.comm import Comm

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


def test_other_ranks_open_the_versions_that_rank_0_has_found() -> None:
    calls: list[object] = []

    class Moving(DataSpec):
        def pinned(self, saved: Mapping[str, Any]) -> DataSpec:
            calls.append(saved)
            return self

        def open(self) -> Dataset:
            calls.append("opened")
            return Dataset(Numbers([3]), None, None)

    class OtherRank(Comm):
        def run_on_main(self, call: object) -> Any:
            return {"revision": "of rank 0"}

    for comm, expected in (
        (Comm(0, 1, 0, torch.device("cpu")), [{}, "opened"]),
        (OtherRank(1, 2, 1, torch.device("cpu")), [{"revision": "of rank 0"}, "opened"]),
    ):
        calls.clear()
        assert open_on_all_ranks(Moving(kind="x", name="x"), comm).train.sizes == [3]
        assert calls == expected
