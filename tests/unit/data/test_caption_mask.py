"""Words kept of a caption: the blocks of open_clip, and budgets in tokens."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import open_clip.tokenizer as theirs  # type: ignore[import-untyped]
import pytest
import torch
from scipy import stats

from clipx.data.augment_spec import CaptionMaskSpec, CaptionRule
from clipx.data.texts import kinds_of, masked, tagger
from clipx.model.tokenizer import Tokenizer

# Each word is one token of CLIP's vocabulary.
LONG = "a small brown dog jumps over the red fence while two children watch from our old wooden house"
WORDS = LONG.split()
CONTEXT = 8  # with start and end: 6 words
TOKENIZER = Tokenizer(CONTEXT)


def test_blocks_are_those_of_open_clip() -> None:
    assert len(set(WORDS)) == len(WORDS) == len(TOKENIZER.encode(LONG)) - 2, "each word is a token"
    rule, count = CaptionMaskSpec(rule=CaptionRule.block), 3000
    found = Counter(masked(LONG, rule, TOKENIZER, f"0/{position}/caption") for position in range(count))
    tokenizer = theirs.SimpleTokenizer()
    torch.manual_seed(0)
    rows = theirs.simple_mask_tokenize(
        [LONG] * count, CONTEXT, tokenizer.sot_token_id, tokenizer.eot_token_id, tokenizer.encode
    )
    expected = {tokenizer.decode(row[1:-1].tolist()).strip() for row in rows}
    assert found.keys() == expected
    assert len(found) == len(WORDS) - 6 + 1
    assert stats.chisquare(list(found.values())).pvalue > 0.001, "uniform, as theirs"


def test_random_words_are_drawn_as_by_open_clip() -> None:
    """Each word as often, in their order."""
    rule, count = CaptionMaskSpec(rule=CaptionRule.random), 3000
    ours = [masked(LONG, rule, TOKENIZER, f"0/{position}/caption").split() for position in range(count)]
    tokenizer = theirs.SimpleTokenizer()
    torch.manual_seed(0)
    rows = theirs.random_mask_tokenize(
        [LONG] * count, CONTEXT, tokenizer.sot_token_id, tokenizer.eot_token_id, tokenizer.encode
    )
    for drawn in (ours, [tokenizer.decode(row[1:-1].tolist()).split() for row in rows]):
        assert all(len(words) == 6 and words == sorted(words, key=WORDS.index) for words in drawn)
        counts = Counter(word for words in drawn for word in words)
        assert stats.chisquare([counts[word] for word in WORDS]).pvalue > 0.001, "uniform"


@pytest.mark.parametrize("kept", range(1, 18))
def test_words_of_each_kind_are_as_many_as_in_open_clip(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip's choice among words of one kind depends on an unstable sort; with a stable one, the words are equal."""
    kinds = kinds_of(WORDS)
    tags = dict(zip(WORDS, (("NN", "JJ", "VB", "IN")[kind] for kind in kinds), strict=True))
    nltk = SimpleNamespace(
        tokenize=SimpleNamespace(word_tokenize=str.split), pos_tag=lambda words: [(word, tags[word]) for word in words]
    )
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    monkeypatch.setattr(theirs, "_nltk_init", True)
    tokenizer = theirs.SimpleTokenizer()

    def of_open_clip() -> list[str]:
        ids = (tokenizer.sot_token_id, tokenizer.eot_token_id)
        (row,) = theirs.syntax_mask_tokenize([LONG], kept + 2, *ids, tokenizer.encode)
        return str(tokenizer.decode(row[1:-1].tolist())).split()

    ours = masked(LONG, CaptionMaskSpec(rule=CaptionRule.syntax), Tokenizer(kept + 2), "0").split()
    assert Counter(tags[word] for word in ours) == Counter(tags[word] for word in of_open_clip())
    stable = SimpleNamespace(argsort=partial(np.argsort, kind="stable"), take=np.take, array=np.array)
    monkeypatch.setattr(theirs, "np", stable)
    assert ours == of_open_clip()


def test_the_tagger_reads_no_model_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "morphmodel_en.pgz").write_bytes(b"not a model, which HanTa would unpickle")
    monkeypatch.chdir(tmp_path)
    tagger.cache_clear()
    assert kinds_of(["dog"]) == [0]


@pytest.mark.parametrize("rule", list(CaptionRule))
def test_a_share_or_a_number_of_tokens_is_kept(rule: CaptionRule) -> None:
    for share, tokens, kept in ((0.5, None, 9), (1.0, 5, 5), (0.1, None, 2), (0.5, 3, 3)):
        for position in range(20):
            found = masked(LONG, CaptionMaskSpec(rule=rule, share=share, tokens=tokens), Tokenizer(77), str(position))
            words = found.split()
            assert len(words) == kept, f"{share=} {tokens=}"
            remaining = iter(WORDS)
            assert all(word in remaining for word in words), "in their order"


@pytest.mark.parametrize("rule", list(CaptionRule))
def test_a_caption_of_megabytes_is_read_at_its_beginning(rule: CaptionRule) -> None:
    """White space to the end of what is read has no word: a search from each of its characters takes minutes."""
    spec, space = CaptionMaskSpec(rule=rule), " " * 10**6
    assert masked(f"{LONG} {space}dog", spec, TOKENIZER, "0") == masked(LONG, spec, TOKENIZER, "0")
    assert len(masked(space, spec, TOKENIZER, "0")) <= len(space)
