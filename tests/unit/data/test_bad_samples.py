"""Bad samples: their counts and the limit on their share, limits on captions and images, mismatched captions."""

from __future__ import annotations

import pytest
from helpers.samples import Numbers, encode, picture
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.bad_samples import BadCount, BadSampleCounter
from clipx.data.modified import Filtered, Mismatched
from clipx.data.source import BadRecord, BadSample
from clipx.data.spec import Dataset, DataSpec, open_data
from clipx.errors import DataError

# ------------------------------------------------------------------------------------------------ counts of bad samples


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


# --------------------------------------------------------------------------------------------------------------- limits


def reason(source: Filtered, index: int) -> str | None:
    try:
        source.read(index)
    except BadSample as fault:
        return str(fault)
    return None


def test_an_image_with_a_side_below_the_limit_is_a_bad_sample() -> None:
    sizes = [(20, 16), (16, 20), (19, 17), (17, 17), (40, 16)]
    small = "image has {} pixels, a side below data.min_side=17"
    for kind in ("JPEG", "PNG", "WEBP"):
        images = {i: encode(picture(*size), kind) for i, size in enumerate(sizes)} | {5: b"GIF89a", 6: b"\xff\xd8\xff"}
        told = [reason(Filtered(Numbers([7], images=images), 0, 17), i) for i in range(7)]
        good_and_damaged = [None, None, small.format("40x16"), None, None]
        assert told == [small.format("20x16"), small.format("16x20"), *good_and_damaged], kind
    assert reason(Filtered(Numbers([3], broken=frozenset({1})), 1000, 1000), 1) == "broken on purpose"


def test_held_out_samples_are_not_filtered() -> None:
    class Both(DataSpec):
        def open(self) -> Dataset:
            return Dataset(Numbers([3]), Numbers([2]), None)

    opened = open_data(Both(kind="x", name="x", min_side=17))
    assert reason(opened.train, 0) and isinstance(opened.held_out, Numbers)  # type: ignore[arg-type]
    assert isinstance(open_data(Both(kind="x", name="x")).train, Numbers), "no filter is applied without a limit"


# -------------------------------------------------------------------------------------------------- mismatched captions


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


def test_an_unreadable_partner_is_a_bad_sample() -> None:
    whole = Mismatched.of(Numbers([10]), 1.0, 0)
    source = Mismatched.of(Numbers([10], broken=frozenset({whole.partner(7)})), 1.0, 0)
    with pytest.raises(BadSample, match="broken on purpose"):
        source.read(7)
