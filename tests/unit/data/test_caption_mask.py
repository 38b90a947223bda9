"""Words kept of a caption: the rules of open_clip's masks, budgets in tokens, and draws of the position alone."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip.tokenizer as theirs  # type: ignore[import-untyped]
import pytest
import torch
from helpers.samples import Numbers, jpeg
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from clipx.data.batch import Batch
from clipx.data.caption_mask import kinds_of, masked, tagger
from clipx.data.caption_mask_spec import CaptionMaskSpec, CaptionRule
from clipx.data.loader import train_loader
from clipx.data.order import Order
from clipx.data.source import Sample
from clipx.data.views import ImageView
from clipx.model.tokenizer import Tokenizer

# Each word is one token of CLIP's vocabulary.
LONG = "a small brown dog jumps over the red fence while two children watch from our old wooden house"
WORDS = LONG.split()
CONTEXT = 8  # with start and end: 6 words
TOKENIZER = Tokenizer(CONTEXT)


def spec(rule: str) -> CaptionMaskSpec:
    return CaptionMaskSpec(rule=CaptionRule(rule))


def ours(rule: str, count: int = 3000) -> Counter[str]:
    return Counter(masked(LONG, spec(rule), TOKENIZER, f"0/{position}/caption") for position in range(count))


def of_open_clip(mask: Any, count: int = 3000) -> Counter[str]:
    """Returns the texts that a mask of open_clip keeps."""
    tokenizer = theirs.SimpleTokenizer()
    torch.manual_seed(0)
    random.seed(0)
    rows = mask([LONG] * count, CONTEXT, tokenizer.sot_token_id, tokenizer.eot_token_id, tokenizer.encode)
    return Counter(tokenizer.decode(row[1:-1].tolist()).strip() for row in rows)


def test_blocks_are_those_of_open_clip() -> None:
    assert len(set(WORDS)) == len(WORDS) == len(TOKENIZER.encode(LONG)) - 2, "each word is a token"
    found, expected = ours("block"), of_open_clip(theirs.simple_mask_tokenize)
    assert found.keys() == expected.keys()
    assert len(found) == len(WORDS) - 6 + 1
    assert stats.chisquare(list(found.values())).pvalue > 0.001, "uniform, as theirs"


def test_random_words_are_those_of_open_clip() -> None:
    found, expected = ours("random"), of_open_clip(theirs.random_mask_tokenize)
    for texts in (found, expected):
        assert all(len(text.split()) == 6 for text in texts)
        assert all(sorted(text.split(), key=WORDS.index) == text.split() for text in texts)
        kept = Counter(word for text in texts.elements() for word in text.split())
        assert kept.keys() == set(WORDS)
        assert stats.chisquare(list(kept.values())).pvalue > 0.001, "each word is kept equally often"


def test_syntax_is_that_of_open_clip_with_the_same_tagger(monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip's rule on the tags of HanTa: nltk's tagger downloads its model."""
    penn = {0: "NN", 1: "JJ", 2: "VB", 3: "XX"}
    nltk = types.ModuleType("nltk")
    nltk.tokenize = types.SimpleNamespace(word_tokenize=str.split)  # type: ignore[attr-defined]
    nltk.pos_tag = lambda words: [(w, penn[k]) for w, k in zip(words, kinds_of(words), strict=True)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    monkeypatch.setattr(theirs, "_nltk_init", True)
    stable = functools.partial(np.argsort, kind="stable")  # numpy's default sorts words of a kind in any order
    monkeypatch.setattr(theirs, "np", types.SimpleNamespace(argsort=stable, array=np.array, take=np.take))
    for context in (4, 8, 14):
        tokenizer, reference = Tokenizer(context), theirs.SimpleTokenizer()
        captions = [" ".join(WORDS[start:]) for start in range(3)]
        expected = theirs.syntax_mask_tokenize(
            captions, context, reference.sot_token_id, reference.eot_token_id, reference.encode
        )
        found = tokenizer([masked(caption, spec("syntax"), tokenizer, "0") for caption in captions])
        assert torch.equal(found, expected)


def test_the_tagger_reads_no_model_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "morphmodel_en.pgz").write_bytes(b"not a model, which HanTa would unpickle")
    monkeypatch.chdir(tmp_path)
    tagger.cache_clear()
    assert kinds_of(["dog"]) == [0]


# ---------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("rule", list(CaptionRule))
def test_captions_that_fit_are_unchanged_and_unusual_ones_are_masked(rule: CaptionRule) -> None:
    for caption in ("two  dogs, one cat", "a", "", "  dogs "):
        assert masked(caption, CaptionMaskSpec(rule=rule), TOKENIZER, "0") == caption
    for caption in ("x" * 5000, "!" * 500, "😀 " * 300, "&amp;lt;" * 200, "word " * 50_000):
        found = masked(caption, CaptionMaskSpec(rule=rule), TOKENIZER, "0")
        assert found and TOKENIZER([found]).shape == (1, CONTEXT), caption[:9]


@pytest.mark.parametrize("rule", list(CaptionRule))
def test_a_share_or_a_number_of_tokens_is_kept(rule: CaptionRule) -> None:
    for share, tokens, kept in ((0.5, None, 9), (1.0, 5, 5), (0.1, None, 2), (0.5, 3, 3)):
        for position in range(20):
            found = masked(LONG, CaptionMaskSpec(rule=rule, share=share, tokens=tokens), Tokenizer(77), str(position))
            words = found.split()
            assert len(words) == kept, f"{share=} {tokens=}"
            remaining = iter(WORDS)
            assert all(word in remaining for word in words), "in their order"


TEXTS = {  # words of several tokens; a script without spaces
    "a photograph of honorificabilitudinitatibus, an unpronounceable word, in Qwghlm": " ",
    "古い木造の家の前で小さな茶色の犬が赤い柵を飛び越える": "",
}


@given(st.sampled_from(CaptionRule), st.sampled_from(sorted(TEXTS)), st.integers(4, 20), st.integers(0))
def test_whole_words_or_characters_are_kept_in_their_order_if_they_fit(
    rule: CaptionRule, caption: str, context: int, position: int
) -> None:
    tokenizer, separator = Tokenizer(context), TEXTS[caption]
    found = masked(caption, CaptionMaskSpec(rule=rule), tokenizer, str(position))
    pieces = found.split() if separator else list(found)
    remaining = iter(caption.split() if separator else caption)
    assert pieces and all(piece in remaining for piece in pieces)
    assert len(tokenizer.encode(found)) <= context or len(pieces) == 1


# ---------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Described(Numbers):
    """Samples with long captions."""

    def read(self, index: int) -> Sample:
        Numbers.read(self, index)
        return Sample(jpeg(index), [f"{index} {LONG}", f"{LONG} number {index}"], index)


SOURCE = Described([17, 40, 4], broken=frozenset({3, 40}))


def batches(mask: CaptionMaskSpec | None, start: int = 0, **options: Any) -> list[Batch]:
    settings = {"seed": 3, "batch": 12, "rank": 0, "world": 1, "workers": 0, "prefetch": 2, "pin": False, **options}
    view, order = ImageView(12, [0.5, 1.0], 10**6), Order(SOURCE.sizes, seed=3, window=30)
    return list(train_loader(SOURCE, order, view, TOKENIZER, samples=range(start, 96), mask=mask, **settings))


def tokens(found: list[Batch]) -> Tensor:
    return torch.cat([batch.tokens for batch in found])


def test_tokens_depend_on_their_position_alone() -> None:
    plain = tokens(batches(None))
    assert torch.equal(tokens(batches(CaptionMaskSpec())), plain), "truncation is the default"
    mask = spec("random")
    whole = tokens(batches(mask))
    assert torch.equal(tokens(batches(mask, part=5)), whole)
    assert torch.equal(tokens(batches(mask, start=36)), whole[36:])
    ranks = [batches(mask, rank=rank, world=2) for rank in range(2)]
    joined = torch.cat([torch.cat([a.tokens, b.tokens]) for a, b in zip(*ranks, strict=True)])
    assert torch.equal(joined, whole) and not torch.equal(whole, plain)
