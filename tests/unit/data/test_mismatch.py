"""Mismatched captions: exactly the given share of training samples has the captions of another sample."""

from __future__ import annotations

import pytest
from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.mismatch import Mismatched, Permutation
from clipx.data.source import BadSample


def exchanged(n: int, share: float, seed: int = 0) -> dict[int, int]:
    """Returns {sample: sample whose captions it has} of the samples with other captions."""
    source = Mismatched.of(Numbers([n]), share, seed)
    samples = [source.read(i) for i in range(n)]
    assert [sample.label for sample in samples] == list(range(n)), "image and label stay"
    partners = [int(sample.captions[0]) for sample in samples]
    assert [sample.captions for sample in samples] == [[f"{k}", f"number {k}"] for k in partners]
    return {i: k for i, k in enumerate(partners) if i != k}


@given(st.integers(1, 60), st.floats(0, 1))
def test_the_share_is_exact_and_no_caption_is_lost(n: int, share: float) -> None:
    found, count = exchanged(n, share), round(share * n)
    expected = 0 if count == 1 else count  # a single sample has no partner
    assert (len(found), sorted(found)) == (expected, sorted(found.values()))


def test_the_exchange_is_a_function_of_the_seed_and_a_smaller_share_exchanges_a_subset() -> None:
    first, again, other, more = (
        exchanged(200, share, seed) for share, seed in ((0.2, 1), (0.2, 1), (0.2, 2), (0.4, 1))
    )
    assert first == again
    assert len(first.keys() & other.keys()) < 25, "independent sets of 40 of 200 share 8 on average"
    assert first.keys() < more.keys()


@given(st.integers(1, 200), st.text())
def test_the_permutation_covers_its_range_and_has_an_inverse(size: int, key: str) -> None:
    order = Permutation(size, key)
    values = [order(i) for i in range(size)]
    assert sorted(values) == list(range(size))
    assert [order.inverse(value) for value in values] == list(range(size))


def test_an_unreadable_partner_is_a_bad_sample() -> None:
    whole = Mismatched.of(Numbers([10]), 1.0, 0)
    source = Mismatched.of(Numbers([10], broken=frozenset({whole.partner(7)})), 1.0, 0)
    with pytest.raises(BadSample, match="broken on purpose"):
        source.read(7)
