"""`clipx.vocabulary` writes a tokenizer of the most frequent words, whose last token is the end token."""

from __future__ import annotations

from pathlib import Path

from clipx.extra.prepare.vocabulary import count_words, word_tokenizer
from clipx.model.hf_tokenizer import FileTokenizer
from clipx.model.text_spec import Clean

PAD, END, UNKNOWN = range(3)


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
