"""Who differs from the others, in words."""

from __future__ import annotations

import re

import pytest

import clipx
from clipx.distributed.consistency import code_version, describe_mismatch, digest, format_ranks


def test_the_code_has_one_version_until_a_source_changes() -> None:
    assert re.fullmatch(rf"{clipx.__version__}\+[0-9a-f]{{8}}", code_version())
    assert code_version() == code_version()


def test_a_digest_depends_on_values_and_not_on_their_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("values", "described"),
    [
        ("aaaa", None),
        ("aaab", "rank 3 (host n1) has x=b, the others a"),
        ("ab", "rank 1 (host n0) has x=b, rank 0 (host n0) a"),
        ("abbb", "rank 0 (host n0) has x=a, the others b"),
        ("aaaabbca", "ranks 4-5 (host n2) have x=b; rank 6 (host n3) has x=c, the others a"),
        ("aaaaaabaab", "ranks 6, 9 (hosts n3, n4) have x=b, the others a"),
        ("aaabcdefgh", "rank 3 (host n1) has x=b; rank 4 (host n2) has x=c; rank 5 (host n2) has x=d; "
         "rank 6 (host n3) has x=e; and 3 more, the others a"),
    ],
)  # fmt: skip
def test_the_ranks_that_differ_are_named(values: str, described: str | None) -> None:
    assert describe_mismatch("x", values, [f"n{rank // 2}" for rank in range(len(values))]) == described


def test_of_many_ranks_some_are_shown() -> None:
    assert format_ranks(range(1000)) == "ranks 0-999"
    assert format_ranks(range(0, 20, 2)) == "ranks 0, 2, 4, 6 and 6 more"
