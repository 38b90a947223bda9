"""Numbers as text."""

from __future__ import annotations

import pytest

from clipx.report.console import format_score, is_headline

NUMBERS = {
    "eval/zeroshot/top1": 0.925,
    "eval/zeroshot/chance": 0.25,
    "eval/zeroshot/samples": 1240,
    "eval/retrieval/image_to_text/recall@1": 0.5,
    "eval/retrieval/image_to_text/median_rank": 3.0,
    "eval/retrieval/image_to_text/samples": 48,
    "eval/mine/top1": 0.5,
    "top1": 0.5,
    "samples": 8,
}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("eval/zeroshot/top1", "92.50% of 1,240"),
        ("eval/retrieval/image_to_text/recall@1", "50.00% of 48"),
        ("eval/retrieval/image_to_text/median_rank", "3"),
        ("eval/zeroshot/chance", "25.00%"),
        ("eval/zeroshot/samples", "1,240"),
        ("eval/mine/top1", "50.00%"),  # an evaluator that does not give the number
        ("top1", "50.00% of 8"),
    ],
)
def test_a_share_is_shown_with_the_number_of_its_samples(name: str, shown: str) -> None:
    assert format_score(name, NUMBERS) == shown


def test_a_number_of_samples_is_no_headline() -> None:
    assert [name for name in NUMBERS if is_headline(name)] == [
        "eval/zeroshot/top1", "eval/retrieval/image_to_text/recall@1", "eval/mine/top1",
    ]  # fmt: skip
