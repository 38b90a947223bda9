"""The tokenizer.json of an export to transformers, read by transformers, against clipx's tokenizer."""

from __future__ import annotations

import html
import re
from collections import Counter
from html.entities import html5
from itertools import cycle, islice
from typing import Any
from unicodedata import combining, normalize, unidata_version

import ftfy
import pytest
from ftfy import fixes
from helpers.odd_texts import odd_texts
from tokenizers import normalizers
from transformers import AutoTokenizer

from clipx.extra.hf_clip.tokenizer import DECODED
from clipx.extra.hf_clip.writing import _write_tokenizer
from clipx.model.tokenizer import Tokenizer

LENGTH = 77
REFERENCE = re.compile(r"&(#[0-9]+;?|#[xX][0-9a-fA-F]+;?|[^\t\n\f <&#;]{1,32};?)")
VALUES = {
    value for number in DECODED for value in (html.unescape(f"&#{number};"), html.unescape(f"&#{number};").upper())
}
_NFC, _LOWER = normalizers.NFC(), normalizers.Lowercase()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exported")
    _write_tokenizer(folder, LENGTH)
    return AutoTokenizer.from_pretrained(folder)


def kind(text: str) -> str:
    """Returns the documented kind of a text whose tokens differ: a row of the table in docs/guides/export.md."""
    if ftfy.fix_text(text) != ftfy.fix_text(text, fix_encoding=False):
        return "broken encoding"
    levels = [ftfy.fix_text(text, unescape_html=False)]
    for step in islice(cycle([fixes.unescape_html, html.unescape]), 8):
        levels.append(step(levels[-1]))
    if any(_undecoded(match[1]) for level in levels for match in REFERENCE.finditer(level)):
        return "reference"
    return "newer character" if any(map(_newer, set(text))) else "undocumented"


def _undecoded(name: str) -> bool:
    """Returns whether a name or number is of none of the characters of which references are decoded."""
    if name[0] == "#":
        digits = name[1:].rstrip(";")
        return (int(digits[1:], 16) if digits[0] in "xX" else int(digits)) not in DECODED
    value = html5.get(name) or fixes.unescape_html(f"&{name}")
    return value not in VALUES and value[0] != "&"


def _newer(character: str) -> bool:
    """Returns whether the tokenizers' tables do not have a combining mark or a capital letter that Python has."""
    marked = [f"a{pair}" for mark in "\u0334\u0323\u0301\u05b0" for pair in (character + mark, mark + character)]
    unsorted = combining(character) and any(normalize("NFC", one) != _NFC.normalize_str(one) for one in marked)
    return unsorted or character.lower() != _LOWER.normalize_str(character)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_tokens_of_odd_texts_equal_clipx(count: int, theirs: Any) -> None:
    texts = odd_texts(count, seed=43)
    rows = Tokenizer(LENGTH)(texts).tolist()
    found = theirs(texts, padding="max_length", truncation=True)["input_ids"]
    differ = [
        text
        for text, row, other in zip(texts, rows, found, strict=True)
        if _used(_used(row, Tokenizer.pad_id), Tokenizer.end_id) != _used(other, Tokenizer.end_id)
    ]
    kinds = Counter(map(kind, differ))
    assert set(kinds) == {"broken encoding", "reference", "newer character"}, [
        ascii(text) for text in differ if kind(text) == "undocumented"
    ][:3]
    assert len(differ) < 0.12 * count
    if count == 10_000 and unidata_version == "14.0.0":  # of Python 3.11: numbers of docs/guides/export.md
        assert kinds == {"broken encoding": 616, "reference": 328, "newer character": 49}


def _used(row: list[int], padding: int) -> list[int]:
    """Returns a row without its padding: zeros in clipx, end tokens in transformers, which the model does not read."""
    return row[: next(length for length in range(len(row), 0, -1) if row[length - 1] != padding)]


def test_common_typography_and_markup_have_equal_tokens(theirs: Any) -> None:
    texts = [
        "“A dog’s life” – ‘best’ of… ﬁve ﬂags, ｆｕｌｌ　ｗｉｄｔｈ ﾊﾟﾝ", "Ο ΟΔΥΣΣΕΎΣ. ΣΑΣ' Σ ΑΣ'Σ İI Straße STRAẞE",
        "AT&T R&amp;D &lt;b&gt; &quot;caf&eacute;&quot; &#39;90s &amp;amp;lt; it&rsquo;s &EACUTE; &copy2020 &notin; &notit",
        "<b>it&rsquo;s</b> &amp;amp;lt; &EACUTE;", "one &amp;amp;rsquo;\n&rsquo; <i>\n&rsquo; &amp;amp;rsquo;",
        "<end_of_text>", "a<start_of_text><end_of_text><END_OF_TEXT>b !!<end_of_text><end_of_text>", "<|endoftext|>",
        "a\x00e\x01\u0301 \x1b[1;31mred\x1b[0m \x85\x91x\x92 \ufeff\u200b", "\x01\x02\x03&\x01amp;", "", " \n",
        "word " * 100, " " * 4000 + "a photo " * 500, "x" * 5000,
    ]  # fmt: skip
    ours = Tokenizer(LENGTH)
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode(text), ascii(text)
        ids = ours(["", text])[1].tolist()
        assert theirs.decode(ids[: ids.index(ours.end_id)], skip_special_tokens=True) == ours.decode(
            [i for i in ids[: ids.index(ours.end_id)] if i < ours.start_id]
        )
    assert theirs.convert_ids_to_tokens([ours.start_id, ours.end_id]) == ["<start_of_text>", "<end_of_text>"]
    assert (len(theirs), theirs.model_max_length, theirs.pad_token_id) == (ours.vocab_size, LENGTH, ours.end_id)
