"""Cleaning of captions: text of one caption, captions that many pictures share, captions that repeat another one."""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from clipx.data.source import BadSample

_MARKUP = re.compile(r"<!--.*?-->|<[^<>]*>", re.DOTALL)
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)
_DUMP = re.compile(r"\b(?:HASH|ARRAY)\(0x[0-9a-f]+\)")  # a data structure that a Perl program printed as text
_MAIL = re.compile(r"[\w.+-]+\s?@\s?[\w-]+\.\w+")
_TOOL = re.compile(
    r"^(?:this work is (?:dedicated|hereby released|released)"
    r"|(?:created?|made|drawn) (?:with|in|using) (?:the )?\w+\W*$)",
    re.IGNORECASE,
)
_ENDING = re.compile(r"\.(?:svg|png)\b", re.IGNORECASE)
_CREDIT = re.compile(r"^clip ?art by [^-]+ - ", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+")
_ARTICLES = frozenset(("a", "an", "the"))


def clean(text: str, author: str = "") -> str:
    """Returns the text of a caption as one line without markup, addresses, credits and control characters.

    Raises BadSample with the reason if no caption is left, or it is the name of the author.
    """
    text = _repaired(html.unescape(text))
    for pattern in (_MARKUP, _URL, _DUMP, _ENDING):
        text = pattern.sub(" ", text)
    text = "".join(" " if c == "_" or unicodedata.category(c)[0] in "CZ" else c for c in text)
    text = _CREDIT.sub("", " ".join(text.split())).strip()
    if _MAIL.search(text):
        raise BadSample("caption contains an e-mail address")
    if not any(map(str.isalpha, text)):
        raise BadSample("caption has no letter")
    if _TOOL.match(text) or text.casefold() == author.strip().casefold():
        raise BadSample("caption is a credit or a licence")
    return text


def _repaired(text: str) -> str:
    """Returns the text that was encoded as UTF-8 and decoded as Latin-1, the encoding of the chunk tEXt."""
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


def shared(captions: Sequence[Sequence[str]], most: int) -> set[str]:
    """Returns the captions that more than `most` pictures have, case-folded.

    Args:
        captions: captions of each picture.
    """
    counts = Counter(text for of_one in captions for text in {caption.casefold() for caption in of_one})
    return {text for text, count in counts.items() if count > most}


def says_more(caption: str, others: Sequence[str]) -> bool:
    """Returns whether the caption has a word, other than an article, that each of the other captions lacks."""
    words = _words(caption)
    return all(words - _words(other) for other in others)


def _words(caption: str) -> set[str]:
    return set(_WORD.findall(caption.casefold())) - _ARTICLES
