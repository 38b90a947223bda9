"""Words kept of a caption: the rules of open_clip's masks, budgets in tokens, and draws of the position alone."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import open_clip.tokenizer as theirs  # type: ignore[import-untyped]
import pytest
import torch
from scipy import stats

from clipx.data.caption_mask import kinds_of, masked, tagger
from clipx.data.caption_mask_spec import CaptionMaskSpec, CaptionRule
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
def test_a_share_or_a_number_of_tokens_is_kept(rule: CaptionRule) -> None:
    for share, tokens, kept in ((0.5, None, 9), (1.0, 5, 5), (0.1, None, 2), (0.5, 3, 3)):
        for position in range(20):
            found = masked(LONG, CaptionMaskSpec(rule=rule, share=share, tokens=tokens), Tokenizer(77), str(position))
            words = found.split()
            assert len(words) == kept, f"{share=} {tokens=}"
            remaining = iter(WORDS)
            assert all(word in remaining for word in words), "in their order"
