"""CLIP's tokenizer against open_clip's, which is an independent implementation of the same encoding."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from html.entities import html5

import open_clip  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from clipx.model import tokenizer as module
from clipx.model.tokenizer import Tokenizer

LONG = 512  # long enough to compare most strings without truncation

# Ranges of code points: scripts, symbols, marks, controls, and recently assigned blocks.
BLOCKS = {
    "controls": (0x00, 0xA1),
    "latin": (0xA1, 0x250),
    "phonetic, modifiers, combining marks": (0x250, 0x370),
    "greek, cyrillic, armenian": (0x370, 0x590),
    "hebrew, arabic, syriac": (0x590, 0x860),
    "arabic extended to malayalam": (0x860, 0xD80),
    "thai to ethiopic": (0xE00, 0x1400),
    "cherokee to greek extended": (0x13A0, 0x2000),
    "spaces, zero width, direction": (0x2000, 0x2070),
    "superscripts, letterlike, roman numerals": (0x2070, 0x2190),
    "symbols, circled letters, dingbats": (0x2190, 0x2C00),
    "cjk punctuation, kana, enclosed": (0x3000, 0x3400),
    "cjk": (0x4E00, 0xA000),
    "latin extended D": (0xA720, 0xA800),
    "hangul": (0xAC00, 0xD7B0),
    "private use": (0xE000, 0xE100),
    "presentation forms, full width, specials": (0xF900, 0x10000),
    "old scripts": (0x10000, 0x11000),
    "indic supplements, new digits": (0x11000, 0x12600),
    "new scripts": (0x16000, 0x1A000),
    "mathematical letters": (0x1D400, 0x1D800),
    "emoji": (0x1F000, 0x1FB00),
    "cjk extensions": (0x2A6D0, 0x33480),
    "tags, variation selectors": (0xE0000, 0xE01F0),
}

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


def row(text: str, length: int = 77) -> list[int]:
    return Tokenizer(length)([text])[0].tolist()


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


def random_strings(block: tuple[int, int], n: int) -> list[str]:
    """Generates strings of code points of a block, mixed with ASCII so that every boundary between classes occurs."""
    rng = random.Random(block[0])
    ascii_mix = "aZ 19'!<_.&;"

    def one() -> str:
        share = rng.choice([1.0, 0.7, 0.3])
        size = rng.randint(1, 40)
        return "".join(
            chr(rng.randrange(*block)) if rng.random() < share else rng.choice(ascii_mix) for _ in range(size)
        )

    return [one() for _ in range(n)]


def test_reference_vectors() -> None:
    assert row("a photo of a cat") == [49406, 320, 1125, 539, 320, 2368, 49407] + [0] * 70
    assert row("") == [49406, 49407] + [0] * 75
    cut = row("word " * 200)
    assert cut[0] == 49406
    assert cut[1:76] == [row("word")[1]] * 75
    assert cut[76] == 49407


def test_empty_batch_and_row_that_fits_exactly() -> None:
    empty = Tokenizer(32)([])
    assert empty.shape == (0, 32)
    assert empty.dtype == torch.int64
    assert row("a b c", 5) == [49406, *row("a b c")[1:4], 49407]
    assert row("a b c d", 5) == row("a b c", 5)


def test_rows_are_writable_and_not_shared() -> None:
    tokenizer = Tokenizer()
    first = tokenizer(["a cat", "a dog"])
    expected = first.clone()
    first.zero_()
    assert torch.equal(tokenizer(["a cat", "a dog"]), expected)


@pytest.mark.parametrize("length", [3, 8, 32, 64, 77, LONG])
def test_equals_open_clip_at_every_length(length: int) -> None:
    assert_same([*captions(600 if length == 77 else 100), *ODD, *SPECIALS], length)


def test_equals_open_clip_on_random_unicode() -> None:
    """Strings of one block each, and across blocks."""
    rng, blocks = random.Random(11), list(BLOCKS.values())
    mixed = ["".join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randint(1, 60))) for _ in range(300)]
    assert_same([*(text for block in blocks for text in random_strings(block, 50)), *mixed], LONG)


def test_classes_of_code_points_equal_open_clip() -> None:
    """Samples every plane; the split between a letter and a mark reveals the class of the code point."""
    points = [c for c in range(0, 0x34000, 11) if unicodedata.category(chr(c)) != "Cs"]
    lines = [points[i : i + 32] for i in range(0, len(points), 32)]
    assert_same([" ".join(f"a{chr(c)}!" for c in line) for line in lines], LONG)


def test_equals_open_clip_on_html_entities() -> None:
    names = sorted(html5)
    texts = [f"a &{name} b&amp;{name}c <i>&{name}" for name in names] + [f"x &{name.upper()} &{name}" for name in names]
    assert_same(texts[::7], LONG)


def test_equals_open_clip_on_very_long_texts() -> None:
    rng = random.Random(3)
    word = "".join(rng.choices("abcdefghij", k=3000))
    assert_same([word, "ab" * 1000, "é" * 1500, "?" * 3000, "1" * 3000, " ".join(captions(300))], 77)
    assert_same([word, "?!" * 700], 4096)


def test_unseen_and_seen_words_encode_alike_past_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SEEN", 50)
    monkeypatch.setattr(module._word_encoder(), "_seen", dict(module._SPECIAL))  # other tests share the encoder
    texts = captions(200)
    for _ in range(2):
        for i in range(0, len(texts), 8):
            assert_same(texts[i : i + 8], 77)
    assert len(module._word_encoder()._seen) <= 50
    assert row("<end_of_text> a") == [49406, 49407, 320, 49407] + [0] * 73


def test_equal_from_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SEEN", 50)  # so that threads replace the shared table concurrently
    tokenizer, texts = Tokenizer(), captions(800)
    batches = [texts[i : i + 10] for i in range(0, len(texts), 10)]
    with ThreadPoolExecutor(8) as pool:
        rows = torch.cat(list(pool.map(tokenizer, batches)))
    assert torch.equal(rows, oracle(77)(texts))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a photo of a cat", "a photo of a cat"),
        ("  A   Photo\n of\ta CAT ", "a photo of a cat"),
        ("it's 10!", "it 's 1 0 !"),
        ("caf&amp;eacute; 猫 🙂", "café 猫 🙂"),
        ("a !a ! b!!", "a ! a ! b !!"),
        ("hello <end_of_text> world", "hello world"),
        ("", ""),
    ],
)
def test_decode_inverts_encode(text: str, expected: str) -> None:
    tokenizer = Tokenizer()
    assert tokenizer.decode(tokenizer([text])[0].tolist()) == expected
    assert tokenizer.decode(tokenizer([text])[0]) == expected  # type: ignore[arg-type]


def test_decode_keeps_every_character_of_words() -> None:
    tokenizer = Tokenizer(LONG)
    texts = [*captions(100), *random_strings(BLOCKS["cjk"], 50), *random_strings(BLOCKS["emoji"], 50)]
    for text, ids in zip(texts, tokenizer(texts).tolist(), strict=True):
        decoded = tokenizer.decode(ids)
        assert decoded.replace(" ", "") == module._clean(text).replace(" ", "")
        assert tokenizer([decoded])[0].tolist() == ids
    assert tokenizer.decode(row("\U0001fabf")[:2]) == "\ufffd", "a truncated character"
    assert 0 in row("a != b")[:4] and tokenizer.decode(row("a != b")) == "a != b", "token 0 inside the text"


@pytest.mark.parametrize("bad", [-1, 49408])
def test_decode_rejects_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}, must be in \[0, 49408\)"):
        Tokenizer().decode([320, bad])


def test_pickle_round_trip_is_small_and_equal() -> None:
    tokenizer = Tokenizer(33)
    tokenizer(captions(50))
    data = pickle.dumps(tokenizer)
    assert len(data) < 200
    copy = pickle.loads(data)
    assert copy.context_length == 33
    assert torch.equal(copy(captions(50)), tokenizer(captions(50)))


def test_module_does_not_import_torch_and_a_fork_prints_no_warning() -> None:
    code = f"""
import os, runpy, sys
names = runpy.run_path({module.__file__!r})
words = names["_word_encoder"]()
assert "torch" not in sys.modules
expected = dict(words.encode(["cat", "dog"]))
pid = os.fork()
if pid == 0:
    os._exit(0 if dict(words.encode(["cat", "dog", "zebrafish"]))["dog"] == expected["dog"] else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("length", [2, 0, -77, True, 77.0, "77", None])
def test_an_invalid_context_length_raises_an_error(length: object) -> None:
    with pytest.raises(ValueError) as error:
        Tokenizer(length)  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(f"context_length is {length!r}, must be an integer of at least 3")
    assert "use 77" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a photo", "texts is one str, must be a sequence of str: pass [text]"),
        (["a", "b", 3], "texts[2] is int, must be str: pass only str"),
        (["a", None], "texts[1] is NoneType, must be str: pass only str"),
        ([b"a"], "texts[0] is bytes, must be str: pass only str"),
        (None, "texts is NoneType, must be a sequence of str: pass a list"),
        ((t for t in ["a"]), "texts is generator, must be a sequence of str: pass a list"),
    ],
)
def test_invalid_texts_raise_an_error(texts: object, message: str) -> None:
    with pytest.raises(TypeError) as error:
        Tokenizer()(texts)  # type: ignore[arg-type]
    assert str(error.value) == message
