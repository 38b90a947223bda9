"""A tokenizer.json with clipx's tokens, for transformers, whose tokenizers clean a text by nothing else.

The cleaning of `clipx.model.tokenizer` (ftfy, html.unescape twice, single spaces, lower case) is written as Oniguruma's
regular expressions and their replacements, in ftfy's order. Unicode classes are spelled out, because those of Oniguruma
are of another Unicode version. docs/guides/export.md lists what no replacement does.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from html.entities import codepoint2name, html5
from typing import Any

import regex
from ftfy import fixes
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from clipx.model.tokenizer import Tokenizer, vocabulary

START, END = "<start_of_text>", "<end_of_text>"
"""The special tokens by the names that they have in a text. <|endoftext|> is plain text in clipx and open_clip."""

DECODED = sorted({*range(0x100), *codepoint2name, *range(0x2000, 0x2070)})
"""Numbers of the HTML references that are decoded, also by name: Latin-1, HTML 4 and the block General Punctuation.
Each character is a pass over the text; with all 1,500 that have names, a text would take three times as long."""

# Marks within the normalizer: ftfy removes control characters from a text, and white space becomes single spaces.
_LINE, _MARKUP, _AMPERSAND, _START, _END = "\1", "\2", "\3", "\t", "\n"
_AMP = "(?:(?:amp|AMP|#0*38(?![0-9])|#[xX]0*26(?![0-9a-fA-F]));?)"
_SPACE = "Ġ"  # in the alphabet of byte-level tokens


def exported_tokenizer(context_length: int) -> RustTokenizer:
    """Returns a tokenizer whose ids are those of clipx's Tokenizer of this context length, for nearly all texts.

    It neither truncates nor pads: the caller asks for both.
    """
    entries, merges = vocabulary()
    ids = {entry: number for number, entry in enumerate([*entries, START, END])}
    tokenizer = RustTokenizer(models.BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>"))
    letters, numbers, other = map(_class, (r"[\p{L}]", r"[\p{N}]", r"[^\s\p{L}\p{N}]"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            _replace(rf"\A[\s\S]{{{Tokenizer(context_length).read_characters}}}\K[\s\S]+", ""),
            *_repairs(),
            _replace(f"[\n{''.join(filter(str.isspace, _characters()))}]+", " "),
            normalizers.Strip(),
            *_lower_case(),
            *_special_tokens(other),
        ]
    )
    words = rf"<ſtart_of_text>|'(?:[sſ]|t|re|ve|m|ll|d)|[{letters}]+|[{numbers}]|[{other}]+"  # ſ is s in another case
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(token, ids[token]) for token in (START, END)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("</w>", _SPACE), decoders.ByteLevel(), decoders.Replace(Regex(r" \z"), "")]
    )
    # normalized=True: they are searched in the normalized text, where `_special_tokens` leaves them.
    tokenizer.add_special_tokens([AddedToken(token, normalized=True, special=True) for token in (START, END)])
    return tokenizer


# ------------------------------------------------------------------------------------------------- the normalizer


def _repairs() -> Iterator[Any]:
    """Yields what ftfy.fix_text does without its repair of encodings, and html.unescape twice."""
    marks = _LINE + _MARKUP + _AMPERSAND
    yield _replace(f"[{marks}]", "\4")
    # ftfy decodes references up to the first line with a "<"; from there on only html.unescape does, two levels.
    yield _replace(r"(?:\A(?:[^<\n]*\n)*+(?=[^<\n]*<)|\G(?!\A))[^&＆]*\K[&＆]", _MARKUP)
    yield _replace("[&＆]", _LINE)
    yield from _each(_restored)
    yield _replace(r"\x1b\[[\d;]*[a-zA-Z]", "")
    yield from _each(fixes.remove_control_chars, marks)
    yield normalizers.NFC()
    yield from _references()


def _restored(text: str) -> str:
    return fixes.uncurl_quotes(fixes.fix_character_width(fixes.fix_latin_ligatures(fixes.fix_c1_controls(text))))


def _each(fix: Callable[[str], str], kept: str = "") -> Iterator[Any]:
    """Yields the replacements of all characters that `fix` changes, but for those `kept`."""
    sources = defaultdict(list)
    for source, value in zip(_characters(), fix("\n".join(_characters())).split("\n"), strict=True):
        if value != source and source not in kept:
            sources[value].append(source)
    for value, found in sources.items():
        yield normalizers.Replace(found[0] if len(found) == 1 else Regex(f"[{''.join(found)}]"), value)


def _references() -> Iterator[Any]:
    """Yields the decoding of HTML references: one replacement for each value."""
    yield _replace(f"{_LINE}(?:(?:amp|AMP|#0*38|#[xX]0*26);)+", _LINE)
    yield _replace(f"[{_LINE}{_MARKUP}]{_AMP}{_AMP}", _AMPERSAND)
    yield _replace(f"[{_LINE}{_MARKUP}]{_AMP}", _MARKUP)
    by_value: dict[str, list[str]] = {html.unescape(f"&#{number};"): [] for number in DECODED}
    for number in DECODED:
        spelled = f"#(?:0*{number}(?![0-9])|[xX]0*(?i:{number:x})(?![0-9a-fA-F]))"
        value = html.unescape(f"&#{number};")
        by_value[value].append(f"{spelled};?")
        if _fixed(value) != value:
            by_value[_fixed(value)].append(f"(?<={_LINE}){spelled};")
    for name in [name for name, value in html5.items() if value in by_value]:
        by_value[html5[name]].append(name if name.endswith(";") else f"{name}{_unless(name)}")
        for spelled in {name, name.upper()} if name.endswith(";") else ():
            value = _fixed(fixes.unescape_html(f"&{spelled}"))
            if value != html.unescape(f"&{spelled}"):
                by_value.setdefault(value, []).append(f"(?<={_LINE}){spelled}")
    del by_value["&"]  # done
    for value, spellings in by_value.items():  # ' and " come before the typographic quotes that ftfy makes of them
        yield _replace(f"[{_LINE}{_MARKUP}](?:{'|'.join(spellings)})", value)
    yield _replace(f"[{_LINE}{_MARKUP}{_AMPERSAND}]", "&")


def _fixed(value: str) -> str:
    return fixes.remove_control_chars(_restored(value))


def _unless(name: str) -> str:
    """Returns the condition under which a name without semicolon is read: no longer name begins here."""
    longer = [other.removeprefix(name) for other in html5 if other.startswith(name) and other != name]
    return f"(?!{'|'.join(longer)})"


def _lower_case() -> Iterator[Any]:
    """Yields str.lower: a capital sigma that ends a word has another small letter."""
    cased, ignorable = _class(r"(?-i:(?!\p{Case_Ignorable})\p{Cased})"), _class(r"(?-i:\p{Case_Ignorable})")
    yield _replace(rf"[{cased}][{ignorable}]*\KΣ(?![{ignorable}]*+[{cased}])", "ς")
    yield normalizers.Lowercase()


def _special_tokens(other: str) -> Iterator[Any]:
    """Yields what hides the names of special tokens within words, where `clipx.model.tokenizer` does not find them."""
    begin = rf"(?:\G|(?<![{other}]))(?:<(?:[sſ]tart|end)_of_text>)*?\K"
    yield _replace(begin + END, _END)
    yield _replace(begin + START, _START)
    yield _replace(f"<(?={START[1:]}|{END[1:]})", "< ")
    yield normalizers.Replace(_END, END)
    yield normalizers.Replace(_START, START)


def _replace(pattern: str, value: str) -> Any:
    return normalizers.Replace(Regex(pattern), value)


def _class(pattern: str) -> str:
    """Returns the characters of a regular expression as ranges, for use in brackets."""
    found = regex.finditer(f"(?:{pattern})+", _characters(), regex.IGNORECASE)
    return "".join(f"{regex.escape(run[0][0])}-{regex.escape(run[0][-1])}" for run in found)


@cache
def _characters() -> str:
    """Returns all characters but the line feed, which separates them in `_each`."""
    return "".join(chr(code) for code in range(0x110000) if code != 10 and not 0xD800 <= code < 0xE000)
