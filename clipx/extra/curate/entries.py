"""Entries of a metadata list that captions contain, as MetaCLIP matches them (arXiv:2309.16671).

A caption contains an entry if the entry occurs in it between spaces, where the punctuation , . ; : ? ! ` of the caption
is separated by spaces first. Upper and lower case differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipx.errors import ConfigError, DataError
from clipx.storage.files import decode, lines
from clipx.storage.safe_json import read_as

_SPACED = str.maketrans({**{mark: f" {mark} " for mark in ",.;:?!`"}, **dict.fromkeys("\t\n\r", " ")})


@dataclass(frozen=True, slots=True)
class Entries:
    """A metadata list. The number of an entry is its place in the list, from 0; the first place of a repeated one.

    An entry between spaces occurs in a text if its words, split at single spaces, are consecutive words of the text. So
    a dictionary of all entries is sufficient: sequences of words are searched that have the first word and as many
    words as an entry. An automaton of pyahocorasick takes twice the memory and half the time.
    """

    texts: Sequence[str]
    numbers: Mapping[str, int]
    lengths: Mapping[str, Sequence[int]]
    """Numbers of words, from 2, of the entries with this first word."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> Entries:
        numbers, lengths = dict[str, int](), dict[str, set[int]]()
        for number, text in enumerate(texts):
            if text.strip():
                numbers.setdefault(text, number)
                words = text.split(" ")
                if len(words) > 1:
                    lengths.setdefault(words[0], set()).add(len(words))
        return cls(texts, numbers, {first: sorted(found) for first, found in lengths.items()})

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(map(repr, self.texts)).encode()).hexdigest()

    def match(self, captions: Iterable[str]) -> list[int]:
        """Returns the sorted numbers of the entries that the captions contain."""
        found = set[int | None]()
        for caption in captions:
            words = caption.translate(_SPACED).split(" ")
            for start, first in enumerate(words):
                found.add(self.numbers.get(first))
                for length in self.lengths.get(first, ()):
                    found.add(self.numbers.get(" ".join(words[start : start + length])))
        return sorted(number for number in found if number is not None)


def read_entries(file: str) -> Entries:
    """Reads a .json list of texts, or a file with an entry per line. Raises ConfigError or DataError."""
    path = Path(file).expanduser()
    try:
        encoded = path.read_bytes()
        texts = read_as(list[str], decode(encoded)) if path.suffix == ".json" else lines(encoded)
    except OSError as error:
        raise ConfigError(f"entries={file} cannot be read ({error.strerror}): check the path") from None
    except ValueError as error:
        raise DataError(f"entries={file} is not a list of texts ({error}): correct the file") from None
    entries = Entries.of(texts)
    if not entries.numbers:
        raise DataError(f"entries={file} has no entry: write one per line, or a JSON list of texts")
    return entries
