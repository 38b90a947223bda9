"""Script of a caption: the Unicode script of most of its letters, a hint at its language."""

from __future__ import annotations

from collections import Counter

import regex

NAMES = (
    *("Latin", "Cyrillic", "Greek", "Armenian", "Georgian", "Hebrew", "Arabic", "Syriac", "Thaana", "Ethiopic"),
    *("Devanagari", "Bengali", "Gurmukhi", "Gujarati", "Oriya", "Tamil", "Telugu", "Kannada", "Malayalam", "Sinhala"),
    *("Thai", "Lao", "Myanmar", "Khmer", "Tibetan", "Mongolian", "Han", "Hiragana", "Katakana", "Bopomofo", "Hangul"),
)
OTHER, NONE = "other", "no letters"
ALL = (*NAMES, OTHER, NONE)
"""All values of `main_script`, in the order of their numbers."""

_LETTERS = regex.compile(
    "|".join([*(rf"(?P<{name}>[\p{{Script={name}}}&&\p{{L}}]+)" for name in NAMES), rf"(?P<{OTHER}>\p{{L}}+?)"]),
    regex.VERSION1,
)


def main_script(text: str) -> str:
    """Returns the script of most letters of a text; of equally frequent ones the first."""
    if text.isascii():
        return "Latin" if any(map(str.isalpha, text)) else NONE
    letters = Counter[str]()
    for found in _LETTERS.finditer(text):
        letters[found.lastgroup] += found.end() - found.start()
    return letters.most_common(1)[0][0] if letters else NONE
