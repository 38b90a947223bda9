"""Messages about ranks whose code or configuration differs."""

from __future__ import annotations

import pytest

from clipx.distributed.consistency import describe_mismatch, digest


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("values", "described"),
    [
        ("aaaa", None),
        ("aaab", "rank 3 (host n1) has x=b, the others a"),
        ("abbb", "rank 0 (host n0) has x=a, the others b"),
        ("aaaabbca", "ranks 4-5 (host n2) have x=b; rank 6 (host n3) has x=c, the others a"),
        ("aaabcdefgh", "rank 3 (host n1) has x=b; rank 4 (host n2) has x=c; rank 5 (host n2) has x=d; "
         "rank 6 (host n3) has x=e; and 3 more, the others a"),
    ],
)  # fmt: skip
def test_differing_ranks_are_named(values: str, described: str | None) -> None:
    assert describe_mismatch("x", values, [f"n{rank // 2}" for rank in range(len(values))]) == described
