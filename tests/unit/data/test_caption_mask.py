"""Words kept of a caption: the blocks of open_clip, and budgets in tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

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
