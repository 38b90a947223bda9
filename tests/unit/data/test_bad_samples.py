"""Counts of bad samples: draws and distinct samples by reason, over ranks, and the limit on their share."""

from __future__ import annotations

import pytest

from clipx.data.bad_samples import BadCount, BadSampleCounter
from clipx.data.source import BadRecord
from clipx.errors import DataError


def counted(world: int, *keys: str, reason: str = "image is empty") -> BadSampleCounter:
    counter = BadSampleCounter(1.0, 10, world)
    counter.count(0, [BadRecord(key, reason) for key in keys])
    return counter


def test_samples_are_counted_once_and_draws_each_time() -> None:
    ranks = [counted(2, "a", "b", "a"), counted(2, "b", "c"), counted(2, "x", reason="image has 3 pixels")]
    assert BadSampleCounter.sum(ranks) == [
        BadCount("image is empty", draws=5, samples=3, exact=True),
        BadCount("image has … pixels", draws=1, samples=1, exact=True),
    ]
    assert [str(count) for count in BadSampleCounter.sum(ranks)] == [
        "3 samples, drawn 5 times: image is empty",
        "1 sample, drawn 1 times: image has … pixels",
    ]


def test_the_error_during_training_names_an_example_and_the_list() -> None:
    counter = BadSampleCounter(0.1, samples=4)
    with pytest.raises(DataError) as caught:
        counter.count(4, [BadRecord("a.tar:x", "image is empty")])
    assert str(caught.value) == (
        "1 of 5 samples are bad, more than data.max_bad_share=0.1 (1 × image is empty: a.tar:x); quarantine.jsonl in "
        "the run directory lists them: convert, correct or remove them, or raise the limit"
    )
