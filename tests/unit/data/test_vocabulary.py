"""`clipx.data.vocabulary` writes a tokenizer of the most frequent words, whose last token is the end token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from clipx.data.vocabulary import count_words, word_tokenizer
from clipx.errors import DataError
from clipx.model.hf_tokenizer import FileTokenizer
from clipx.model.text_spec import Clean

PAD, END, UNKNOWN = range(3)


def test_ids_follow_the_frequency_of_words_and_then_the_alphabet() -> None:
    counts = count_words(["a red dot", "A blue dot, a dot", "Red !! <end>"])
    # dot 3, a 3, red 2, then once each: !! , < > blue end
    assert counts == Counter({"a": 3, "dot": 3, "red": 2, ",": 1, "blue": 1, "!!": 1, "<": 1, "end": 1, ">": 1})
    words = word_tokenizer(counts, 64).get_vocab()
    expected = ["<pad>", "<end>", "<unk>", "a", "dot", "red", "!!", ",", "<", ">", "blue", "end"]
    assert sorted(words, key=words.__getitem__) == expected
    assert word_tokenizer(counts, 7).get_vocab().keys() == set(expected[:7])
    with pytest.raises(DataError, match="^the captions have no words: give other data$"):
        word_tokenizer(Counter(), 8)


def test_the_last_token_of_every_row_is_the_end_token(tmp_path: Path) -> None:
    word_tokenizer(count_words(["a red dot and a blue dot"]), 16).save(str(tmp_path / "w.json"))
    tokens = FileTokenizer(str(tmp_path / "w.json"), 6, 16, Clean.clip)
    a, dot, _, _, red = range(3, 8)  # a, dot, and, blue, red
    rows = tokens(["A RED  dot", "green dot", "", "a a a a a a a dot", "<end> a"])
    assert rows.tolist() == [
        [PAD, PAD, a, red, dot, END],
        [PAD, PAD, PAD, UNKNOWN, dot, END],
        [PAD, PAD, PAD, PAD, PAD, END],
        [a, a, a, a, a, END],
        [PAD, UNKNOWN, UNKNOWN, UNKNOWN, a, END],
    ]
