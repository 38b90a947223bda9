"""Several captions of each sample in a step, and sub-captions: draws and batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import torch
from helpers.loading import train_batches
from helpers.samples import Numbers
from hypothesis import given
from hypothesis import strategies as st

from clipx.data.augment_spec import CaptionMaskSpec
from clipx.data.batch import Batch
from clipx.data.images import PixelReader
from clipx.data.modified import sub_captions
from clipx.data.order import Order
from clipx.data.source import Sample
from clipx.model.packing import TextPacker
from clipx.model.tokenizer import Tokenizer

TOKENIZER, VIEW = Tokenizer(16), PixelReader((12,), [0.5, 1.0], 10**6)
TEXTS = ("a dog runs.", "a cat sits. it sleeps! is it old?", "two birds")
BROKEN = frozenset({3, 8, 9, 40})


@dataclass(frozen=True)
class Texts(Numbers):
    """A source in which sample i has the first captions of `TEXTS`, 1 to 3, with its number."""

    sizes: Sequence[int] = (30, 20)
    broken: frozenset[int] = field(default=BROKEN)

    def read(self, index: int) -> Sample:
        sample = Numbers.read(self, index)
        return Sample(sample.image, [f"{index} {text}" for text in TEXTS[: 1 + index % 3]], index)


def test_sub_captions_are_all_runs_of_at_most_so_many_sentences() -> None:
    text = "One.  Two. Three."
    assert sub_captions(text, 0) == [text]
    assert sub_captions(text, 1) == ["One.", "Two.", "Three."]
    assert sub_captions(text, 2) == ["One.", "Two.", "Three.", "One. Two.", "Two. Three."]
    assert sub_captions(text, 16)[-1] == "One. Two. Three."
    assert sub_captions("Same. Same. Other.", 1) == ["Same.", "Other."]
    long = sub_captions("".join(f"{i:0255}. " for i in range(300)), 10**12)
    assert len(long) > 257 and sum(map(len, long)) <= 2**20, "all runs would have 700 MB"


def rng(number: int) -> random.Random:
    return random.Random(f"draw/{number}")


BY_KEY = Sample(b"", ["a", "b", "c", "d"], captions_by_key=[(0.1, ["a"]), (0.3, ["b", "c"]), (0.6, ["d"])])
PLAIN = Sample(b"", ["a", "b", "c", "d"])


def test_a_single_draw_uses_the_random_numbers_of_a_choice() -> None:
    """So runs with one whole caption per step do not change."""
    for number in range(20):
        assert PLAIN.draw_captions(rng(number))[0] == rng(number).choice(PLAIN.captions)
        one = rng(number)
        ((_, captions),) = one.choices(BY_KEY.captions_by_key, [0.1, 0.3, 0.6])
        assert BY_KEY.draw_captions(rng(number))[0] == one.choice(captions)


def batches(each: int, compared: bool = True, **options: Any) -> list[Batch]:
    source = Texts()
    order, drawn = Order(source.sizes, 3, 30), {"each": each, "compared": compared}
    samples = options.pop("samples", range(96))
    return list(train_batches(source, order, VIEW, TOKENIZER, samples, 12, seed=3, **drawn, **options))


def test_a_batch_has_different_captions_of_each_sample_in_its_order() -> None:
    plain = batches(1, compared=False)
    for batch, single in zip(batches(3), plain, strict=True):
        assert batch.text.each == 3
        assert torch.equal(batch.index, single.index) and torch.equal(batch.image.rows[0], single.image.rows[0])
        texts = batch.text.rows[0].view(12, 3, -1)
        assert torch.equal(texts[:, 0], single.text.rows[0])
        for index, rows in zip(batch.index.tolist(), texts, strict=True):
            own = TOKENIZER([f"{index} {text}" for text in TEXTS[: 1 + index % 3]])
            assert len(rows.unique(dim=0)) == len(own)
            assert all((row == own).all(1).any() for row in rows)


def test_digests_are_of_whole_captions_whatever_a_mask_keeps() -> None:
    for shown, whole in zip(batches(2, mask=CaptionMaskSpec(tokens=1)), batches(2), strict=True):
        assert not torch.equal(shown.text.rows[0], whole.text.rows[0])
        assert torch.equal(shown.text.digests, whole.text.digests)


def test_texts_are_packed_with_the_images_of_their_micro_batch() -> None:
    packer, whole = TextPacker(packed=True), batches(2)
    for micro_batches in (1, 2, 3):
        for batch, plain in zip(batches(2, packer=packer, micro_batches=micro_batches), whole, strict=True):
            chunks = plain.text.split(micro_batches)
            assert [len(chunk) for chunk in chunks] == [24 // micro_batches] * micro_batches
            assert torch.equal(torch.cat([*chunks]), plain.text.rows[0])
            for packed, chunk in zip(batch.text.split(micro_batches), chunks, strict=True):
                assert torch.equal(packed.tokens_T, packer(chunk).tokens_T)
            assert batch.text.tokens == packer.count(plain.text.rows[0])
    uneven = replace(batches(3)[0].text, packers=(packer,)).pack(5).packed[0]  # 12 samples in micro-batches of 3
    assert [packing.shape[0] for packing in uneven] == [9, 9, 9, 9]


LONG = Sample(b"", ["One. Two. Three.", "Four."], sub_captions=2)


@given(st.integers(0), st.sampled_from([PLAIN, BY_KEY, LONG]), st.integers(1, 20))
def test_the_first_caption_is_that_of_a_single_draw_and_all_differ_until_they_repeat(
    number: int, sample: Sample, count: int
) -> None:
    drawn, different = sample.draw_captions(rng(number), count), 6 if sample is LONG else 4
    assert drawn[0] == sample.draw_captions(rng(number))[0]
    assert len(set(drawn)) == min(count, different)
    assert drawn == [drawn[i % different] for i in range(count)]
    assert drawn == sample.draw_captions(rng(number), 20)[:count]


def test_further_captions_are_drawn_by_the_weights_of_the_keys_that_are_left() -> None:
    pairs = Counter(tuple(BY_KEY.draw_captions(rng(number), 2)) for number in range(4000))
    expected = {("d", "a"): 0.6 * 0.25, ("d", "b"): 0.6 * 0.75 / 2, ("a", "d"): 0.1 * 0.6 / 0.9, ("b", "c"): 0.15 * 0.3}
    for pair, share in expected.items():
        limit = NormalDist().inv_cdf(1 - 1e-6) * (share * (1 - share) / 4000) ** 0.5
        assert abs(pairs[pair] / 4000 - share) < limit
