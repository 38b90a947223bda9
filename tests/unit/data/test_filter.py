"""Limits on captions and images: samples below a limit are bad."""

from __future__ import annotations

from helpers.samples import Numbers, encode, picture

from clipx.data.filter import Filtered
from clipx.data.source import BadSample
from clipx.data.spec import Dataset, DataSpec, open_data


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


def test_only_sufficiently_long_captions_of_a_sample_remain() -> None:
    source = Numbers([101])  # sample 7 has the captions `7` and `number 7`
    assert Filtered(source, 2, 0).read(7).captions == ["number 7"]
    assert Filtered(source, 2, 0).read(77).captions == ["77", "number 77"]
    assert reason(Filtered(source, 9, 0), 7) == "caption has 8 characters, fewer than data.min_caption_chars=9"
    assert reason(Filtered(source, 9, 0), 77) is None


def test_held_out_samples_are_not_filtered() -> None:
    class Both(DataSpec):
        def open(self) -> Dataset:
            return Dataset(Numbers([3]), Numbers([2]), None)

    opened = open_data(Both(kind="x", name="x", min_side=17))
    assert reason(opened.train, 0) and isinstance(opened.held_out, Numbers)  # type: ignore[arg-type]
    assert isinstance(open_data(Both(kind="x", name="x")).train, Numbers), "no filter is applied without a limit"
