"""Mismatched captions: exactly the given share of training samples has the captions of another sample."""

from __future__ import annotations

import pytest
from helpers.samples import Numbers

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


def test_the_share_is_exact_and_no_caption_is_lost() -> None:
    for (n, share), count in {(50, 0.2): 10, (50, 1): 50, (7, 0.5): 4, (33, 0.1): 3, (9, 0): 0, (9, 0.1): 0}.items():
        found = exchanged(n, share)  # a single sample has no partner
        assert len(found) == count and sorted(found) == sorted(found.values()), (n, share)


def test_the_exchange_is_a_function_of_the_seed_and_a_smaller_share_exchanges_a_subset() -> None:
    first, again, other, more = (
        exchanged(200, share, seed) for share, seed in ((0.2, 1), (0.2, 1), (0.2, 2), (0.4, 1))
    )
    assert first == again
    assert len(first.keys() & other.keys()) < 25, "independent sets of 40 of 200 share 8 on average"
    assert first.keys() < more.keys()


def test_the_permutation_covers_its_range_and_has_an_inverse() -> None:
    for size in (1, 2, 3, 5, 16, 17, 1000):
        order = Permutation(size, "key")
        values = [order(i) for i in range(size)]
        assert sorted(values) == list(range(size))
        assert [order.inverse(value) for value in values] == list(range(size)), size
    order = Permutation(5_000_000_000, "key")  # takes no memory
    assert all(order.inverse(order(i)) == i for i in (0, 1, 4_999_999_999))


def test_an_unreadable_partner_is_a_bad_sample() -> None:
    whole = Mismatched.of(Numbers([10]), 1.0, 0)
    source = Mismatched.of(Numbers([10], broken=frozenset({whole.partner(7)})), 1.0, 0)
    with pytest.raises(BadSample, match="broken on purpose"):
        source.read(7)
