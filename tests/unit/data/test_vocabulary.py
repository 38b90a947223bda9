"""`clipx.data.vocabulary` writes a tokenizer of the most frequent words, whose last token is the end token."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers.runs import compose

from clipx.data.shapes import TEMPLATES
from clipx.data.vocabulary import VocabularySpec, count_words, vocabulary, word_tokenizer
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


def test_no_word_of_the_data_and_its_prompts_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder/words.json"
    options = ("data=shapes", "data.samples=64", "data.held_out_samples=16")
    spec = compose(*options, f"out={out}", config_name="vocabulary")
    assert isinstance(spec, VocabularySpec)
    vocabulary(spec)
    size = len(json.loads(out.read_text())["model"]["vocab"])
    line = f"model.text.tokenizer={out} model.text.vocabulary={size} model.text.pool=last model.text.packed=false"
    assert f"use it: {line}\n" in capsys.readouterr().out
    run = compose(*options, *line.split(), "model.text.context_length=20")
    dataset = run.data.open()
    assert dataset.classes is not None
    tokens = run.model.text.build_tokenizer()
    captions = [caption for i in range(64) for caption in dataset.train.read(i).captions]
    prompts = [template.replace("{}", name) for template in TEMPLATES for name in dataset.classes.names]
    rows = tokens([*captions, *prompts])
    assert (rows != UNKNOWN).all() and (rows[:, -1] == END).all()
    words = [len(re.findall(r"\w+|[^\w\s]+", text)) for text in (*captions, *prompts)]
    assert (rows != PAD).sum(1).tolist() == [n + 1 for n in words]
    before = out.read_bytes()
    vocabulary(spec)
    assert out.read_bytes() == before
