"""CLIP's tokenizer against open_clip's, which is an independent implementation of the same encoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from html.entities import html5

import ftfy
import open_clip  # type: ignore[import-untyped]
import pytest
import torch
from helpers.odd_texts import odd_texts
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clipx.model import tokenizer as module
from clipx.model.tokenizer import Tokenizer

LONG = 512  # long enough to compare most strings without truncation

ODD = [
    "",
    " \t\r\n\x0b\x0c ",
    "\x00\x01\x1b[31mred\x1b[0m\x7f\x85\x9f",
    "\x1c\x1d\x1e\x1fa\x1cb\x1fc",
    "a\u200bb\u200cc\u200dd\ufeffe\u2060f\u00adg",
    "\u2028line\u2029paragraph\u3000wide\u00a0space\u180e",
    "👩‍👩‍👧‍👦 👍🏽 🏴󠁧󠁢󠁷󠁬󠁳󠁿 1️⃣ 🇫🇷",
    "Z̸̡̛a̵l̴g̷ȯ e\u0301 é \u0345 \u03b1\u0345 a\u0345b !\u0345! 1\u0345",
    "日本語のキャプション、猫の写真。 ｆｕｌｌ　ｗｉｄｔｈ ﾊﾝｶｸ",
    "مرحبا بالعالم \u202bשלום\u202c ١٢٣",
    "½ ² Ⅷ ⅷ ④ Ⓐ 〇 ৪ 12345 3.14e-10 1,000",
    "ΣΊΣΥΦΟΣ ΟΔΟΣ İstanbul ıI ẞß ﬁ ﬆ Straße ſ K Å",
    "\U0001e030\U00010d6f\ua7cb\ua7dd\U00016d67\U00011de0\U00010940",
    "It's IT'S i'VE We'Re they'LL I'M he'D can'T o'clock 'tis ''s 's's'S 'ſ 'ST rock'n'roll",
    "schÃ¶n â€œquotedâ€\x9d doesnâ€™t voilÃ\xa0 l’été “curly”",
    "&lt;b&gt; &amp;amp;eacute; &amp;lt; &#233; &#xE9; &#x1F600; &#0; &#x1c; &#xD800; &#x345; &notanentity; &copy 2020",
    "&EACUTE; &nbsp;&nbsp; <p>caf&eacute;</p> AT&T R&D a&b &; & && &amp",
    "snake_case kebab-case CamelCase http://a.b/c?d=e&f=g#h user@example.com #tag @name",
    "</w> a</w> <w> \\n \\u00e9 {x} [y] `z` ~ ^ |",
    "!", "!!", "!!!!!!!!!!!!!!!!!!!!!!", "a!", "!?", "...", "\u2026",
    "\ud83d\ude00 \ud83d lone",
]  # fmt: skip

SPECIALS = [
    "<start_of_text>",
    "<end_of_text>",
    "a <start_of_text> b <end_of_text> c",
    "<START_OF_TEXT>x<End_Of_Text>",
    "!!<start_of_text> <<end_of_text>>",
    "<start_of_text><end_of_text><end_of_text>!",
    "<start_of_text>'s cat",
    "<\u017ftart_of_text> <end_of_text",
    "&lt;start_of_text&gt; &amp;lt;end_of_text&amp;gt;",
    "<start of text> <startoftext> <|endoftext|>",
    "word " * 80 + "<start_of_text>",
]


@cache
def oracle(length: int) -> Callable[[Sequence[str]], Tensor]:
    tokenizer: Callable[[Sequence[str]], Tensor] = open_clip.get_tokenizer("ViT-B-32", context_length=length)
    return tokenizer


def assert_same(texts: Sequence[str], length: int) -> None:
    ours, theirs = Tokenizer(length)(texts), oracle(length)(texts)
    assert ours.dtype == theirs.dtype == torch.int64
    assert ours.shape == theirs.shape
    wrong = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, [ascii(texts[i]) for i in wrong[:3]]


def captions(n: int) -> list[str]:
    """Generates realistic captions: case, numbers, punctuation, contractions, words missing in the vocabulary."""
    rng = random.Random(7)
    nouns = "cat,dog,Airplane,espresso macchiato,Schnauzer,iPhone12,café,naïveté,猫,xylograph".split(",")
    openings = ["a photo of a", "A close-up of the", "there's a", "It's my", "IMG_2041.JPG:", "“best”", "two", "#42"]
    places = "on the table.;in Zürich!;at 5:30pm;under £3,999.00;(2019);who's asleep;🙂;w/ o'neil".split(";")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEF'-0123456789"

    def caption() -> str:
        made_up = "".join(rng.choices(letters, k=rng.randint(1, 14)))
        parts = [rng.choice(openings), rng.choice(nouns), made_up, rng.choice(nouns), rng.choice(places)]
        return rng.choice([" ", " ", "  ", ", "]).join(parts)

    return [caption() for _ in range(n)]


@pytest.mark.parametrize("length", [3, 8, 32, 64, 77, LONG])
def test_equals_open_clip_at_every_length(length: int) -> None:
    assert_same([*captions(600 if length == 77 else 100), *ODD, *SPECIALS], length)


def test_equals_open_clip_on_odd_texts() -> None:
    assert_same(odd_texts(1000, seed=43), 77)


@given(st.lists(st.text(st.one_of(st.characters(), st.sampled_from("aZ 19'!<_.&;")), max_size=40), max_size=20))
def test_equals_open_clip_on_unicode(texts: list[str]) -> None:
    assert_same([*texts, ""], LONG)


def test_equals_open_clip_on_html_entities() -> None:
    names = sorted(html5)
    texts = [f"a &{name} b&amp;{name}c <i>&{name}" for name in names] + [f"x &{name.upper()} &{name}" for name in names]
    assert_same(texts[::7], LONG)


def test_decode_keeps_every_character_of_words() -> None:
    tokenizer = Tokenizer(LONG)
    texts = [*captions(100), "日本語のキャプション、猫の写真。", "👍🏽 🇫🇷 a\u200bb"]
    for text, ids in zip(texts, tokenizer(texts).tolist(), strict=True):
        decoded = tokenizer.decode(ids)
        assert decoded.replace(" ", "") == module._clean(text).replace(" ", "")
        assert tokenizer([decoded])[0].tolist() == ids
    assert tokenizer.decode(tokenizer(["\U0001fabf"])[0, :2].tolist()) == "\ufffd", "a truncated character"
    ids = tokenizer(["a != b"])[0].tolist()
    assert 0 in ids[:4] and tokenizer.decode(ids) == "a != b", "token 0 inside the text"


LETTERS = "&am\u0301p;<#38xé\u00c3\u0083\uff06\uff41 \n\t\x00\x1b[0\ud83d\u200b\u201c'.!"


@given(st.text(st.sampled_from(LETTERS), min_size=1, max_size=12), st.integers(3, 96), st.integers(0, 2**32))
def test_a_text_of_megabytes_costs_what_its_beginning_costs(unit: str, length: int, seed: int) -> None:
    """One of these would take minutes without the cut. The ids are those of the beginning, alone or before any text."""
    tokenizer = Tokenizer(length)
    read = tokenizer.read_characters
    head = (unit * (read // len(unit) + 1))[:read]
    tail = "".join(random.Random(seed).choices(LETTERS, k=9)) * (1 << 18)
    rows = tokenizer([head, head + tail])
    assert rows[0].tolist() == rows[1].tolist()
    assert tokenizer.encode(head + tail) == tokenizer.encode(head)


def test_what_is_cut_lies_beyond_the_context() -> None:
    """The cut leaves 64 characters for each token, and no entry of the vocabulary has as many, nor half."""
    longest = max(len(piece.decode("utf-8", "replace")) for piece in module._word_encoder().pieces)
    assert 2 * longest <= module._READ_A_TOKEN
    assert_same([" ".join(captions(1000))[:100_000], "a photo " * 10_000, "wide   \n\t " * 5_000], 77)
    assert_same([f"a {'&amp;' + 'amp;' * k}lt; b" for k in range(40)] + [f"&#38;#x26;{'AMP;' * 9}eacute;"], 77)


def test_nested_escapes_are_read_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ftfy takes a pass over the text for each escape in a row, so that its time would be quadratic."""
    passes: list[str] = []
    fix = ftfy.fix_encoding_and_explain  # once in each pass
    monkeypatch.setattr(ftfy, "fix_encoding_and_explain", lambda text, config: passes.append(text) or fix(text, config))
    for escape in ("amp;", "AMP;", "#38;", "#x26;", "#0038;"):
        passes.clear()
        assert module.repaired(f"a &{escape * 4000} b") == "a & b"
        assert 0 < len(passes) <= 12, escape
