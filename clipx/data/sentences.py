"""Sentences of a caption, and its sub-captions: runs of consecutive sentences (DreamLIP, FLAIR, LoTLIP)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MOST = 256  # sentences of a caption; those after them are one
_CHARS = 2**16  # of a caption that are read: a damaged one may have megabytes
_RUNS_CHARS = 2**20  # of its runs: all of 257 sentences would have 700 MB
# The end of a sentence with its closing quotes or brackets, before white space; full-width marks need none.
_END = re.compile(r"""(?<=[.!?…])["'”’»)\]]*\s+|(?<=[。！？])["'”’」』）]*""")
_ABBREVIATIONS = frozenset(
    """mr mrs ms dr st mt prof jr sr vs etc e.g i.e cf vol fig ca approx dept inc ltd co corp gen col lt
    sgt""".split()
)


def sentences(text: str) -> list[str]:
    """Splits a text at its lines and at the ends of its sentences, but not after abbreviations and initials.

    Returns at least one, and at most 257. Reads the first 65,536 characters.
    """
    text = text[:_CHARS]
    found = [sentence for line in text.splitlines() for sentence in _of_line(line)] or [text.strip()]
    return found if len(found) <= _MOST else [*found[:_MOST], " ".join(found[_MOST:])]


def _of_line(line: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(line):
        if not _abbreviated(line[max(start, end.start() - 20) : end.start()]):
            if sentence := line[start : end.end()].strip():
                yield sentence
            start = end.end()
    if rest := line[start:].strip():
        yield rest


def _abbreviated(tail: str) -> bool:
    """Returns whether the period at the end belongs to an abbreviation or an initial, such as St. or J."""
    word = re.split(r"[\s(\[\"'“‘]", tail[:-1])[-1].lower()
    initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
    return tail.endswith(".") and (initials or word in _ABBREVIATIONS)


def sub_captions(text: str, most: int) -> list[str]:
    """Returns each run of 1 to `most` consecutive sentences of a text, once, the short ones first, with up to 1,048,576
    characters in total. 0: the text alone."""
    if not most:
        return [text]
    parts = sentences(text)
    found, left = dict[str, None](), _RUNS_CHARS
    for length in range(1, min(most, len(parts)) + 1):
        for start in range(len(parts) - length + 1):
            run = " ".join(parts[start : start + length])
            left -= len(run)
            if left < 0:
                return list(found)
            found[run] = None
    return list(found)
