"""CLIP's byte-pair text tokenizer: strings -> rows of token ids.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", arXiv:2103.00020.
The merge table bpe_simple_vocab_16e6.txt.gz next to this file is the one that OpenAI published with CLIP (MIT license).
"""

from __future__ import annotations

import gzip
import html
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

# Data workers are parallel already, and some versions of the Rust thread pool warn if a process forks after using it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import regex
import tokenizers
from tokenizers import models, pre_tokenizers

if TYPE_CHECKING:
    from torch import Tensor

_MERGES_FILE = Path(__file__).with_name("bpe_simple_vocab_16e6.txt.gz")
_N_MERGES = 48_894
_WORD_END = "</w>"
_START, _END, _PAD = 49_406, 49_407, 0
_SPECIAL = {"<start_of_text>": (_START,), "<end_of_text>": (_END,)}
_SPECIAL_NAMES = {ids[0]: name for name, ids in _SPECIAL.items()}

# Words are split here and not in Rust: the two regex engines have different Unicode versions (they differ in about
# 17,000 code points), and a table of seen words makes it faster too. Measured on one core with captions of 10 words:
# 147,000 cleaned texts/s, against 76,000 all in Rust with the classes spelled out. The whole call: 139,000 texts/s,
# open_clip's 22,000.
_WORD = regex.compile(
    r"<start_of_text>|<end_of_text>|'(?:s|t|re|ve|m|ll|d)|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    regex.IGNORECASE,
)
# Characters of a text that are read: of each token of the context, and at least. The longest entry of CLIP's vocabulary
# has 24, and a real caption some 5 a token, so what is cut lies beyond the context, unless nearly all of the text is
# white space or escapes. The time of a cleaning is thus bounded, where a damaged caption has megabytes.
_READ_A_TOKEN, READ_AT_LEAST = 64, 4096
_NESTED = 8  # escapes of an ampersand in a row, "&amp;amp;", that are read: ftfy takes a pass over the text for each
_AMPERSANDS = re.compile(rf"(&(?:(?:amp|#0*38|#x0*26);){{{_NESTED}}})(?:(?:amp|#0*38|#x0*26);)+", re.IGNORECASE)
_MAX_SEEN = 1 << 16  # words cached per process, about 15 MB
_MAX_SEEN_LENGTH = 64  # characters; longer words are rare and would make the size of the table depend on the data


class Tokenizer:
    """CLIP's byte-pair encoding (Radford et al., arXiv:2103.00020), with the token ids of OpenAI's weights.

    Picklable, and safe to use from threads and from forked or spawned workers.
    """

    vocab_size: int = 49_408
    start_id: int = _START
    end_id: int = _END
    pad_id: int = _PAD

    def __init__(self, context_length: int = 77) -> None:
        """`context_length`: number of ids in a row, at least 3 (start, one token, end). Raises ValueError."""
        if not isinstance(context_length, int) or context_length < 3:
            raise ValueError(
                f"context_length is {context_length!r}, must be an integer of at least 3 (start, a token, end): "
                "use 77 as CLIP does"
            )
        self.context_length = context_length
        _word_encoder()  # loaded before any fork: workers share its memory

    @property
    def read_characters(self) -> int:
        """Number of characters of a text that are read, more than the context holds of a real one."""
        return max(READ_AT_LEAST, _READ_A_TOKEN * self.context_length)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Encodes B texts as int64 [B, context_length]: start, tokens, end, zeros.

        A longer text is truncated, with the end id at the last position. Raises TypeError for other than a sequence of
        str.
        """
        import torch

        check_texts(texts)
        length = self.context_length
        if not texts:
            return torch.empty((0, length), dtype=torch.int64)
        # Each word has at least one token: no more than length - 2 words fit.
        read = self.read_characters
        split = [_WORD.findall(_clean(text[:read]))[: length - 2] for text in texts]
        ids_of = _word_encoder().encode(chain.from_iterable(split))
        ids = array("q", bytes(8 * len(split) * length))  # zeros, the padding
        for start, words in zip(range(0, len(ids), length), split, strict=True):
            row = self._row(words, ids_of)
            ids[start : start + len(row)] = row
        return torch.frombuffer(ids, dtype=torch.int64).view(len(split), length)

    def text_mask(self, tokens_BL: Tensor) -> Tensor:
        """Returns whether each id of rows [B, L] is a token of its text: not start, end, padding or what follows it."""
        return ((tokens_BL == self.end_id).cumsum(1) == 0) & (tokens_BL != self.start_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of one row of ids, cleaned, with a space after each word or punctuation mark.

        Drops start ids, end ids and padding; bytes that are not UTF-8 become U+FFFD. Raises ValueError for other ids.
        """
        row = [int(i) for i in ids]
        # Id 0 is also a real token ("!" inside a word): only zeros at the end of the row are padding.
        while row and row[-1] == self.pad_id:
            row.pop()
        pieces = _word_encoder().pieces
        for position, i in enumerate(row):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"ids[{position}] is {i}, must be in [0, {self.vocab_size}): decode ids of this vocabulary"
                )
        return b"".join(pieces[i] for i in row if i < self.start_id).decode("utf-8", "replace").strip()

    def encode(self, text: str) -> list[int]:
        """Returns all ids of the characters of a text that are read, without truncation and padding."""
        words = _WORD.findall(_clean(text[: self.read_characters]))
        ids_of = _word_encoder().encode(words)
        return [self.start_id, *chain.from_iterable(ids_of[word] for word in words), self.end_id]

    def piece(self, token: int) -> str:
        """Returns the text of one id, with a space at the end of a word. A part of a character is shown as \\xe4."""
        if token == self.start_id or token == self.end_id:
            return _SPECIAL_NAMES[token]
        return _word_encoder().pieces[token].decode("utf-8", "backslashreplace")

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[int]]:
        return type(self), (self.context_length,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(context_length={self.context_length})"

    def _row(self, words: Iterable[str], ids_of: Mapping[str, Sequence[int]]) -> array[int]:
        """Joins the ids of the words into one row of at most context_length ids, without padding."""
        row = [self.start_id]
        for word in words:
            row += ids_of[word]
        del row[self.context_length - 1 :]
        row.append(self.end_id)
        return array("q", row)


class _WordEncoder:
    """Cached byte-pair ids of single words, computed in Rust, and the bytes of each id."""

    def __init__(self) -> None:
        tokens, merges = vocabulary()
        bpe = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            end_of_word_suffix=_WORD_END,
            cache_capacity=0,
        )
        self._rust = tokenizers.Tokenizer(bpe)
        self._rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._seen: dict[str, Sequence[int]] = dict(_SPECIAL)

    @cached_property
    def pieces(self) -> list[bytes]:
        """Bytes of each id, for `decode`, which training does not call: they take 40 ms."""
        byte_of = _byte_alphabet()
        return [_piece_bytes(token, byte_of) for token in vocabulary()[0]]

    def encode(self, words: Iterable[str]) -> Mapping[str, Sequence[int]]:
        """Returns the ids of each distinct word. Encodes new words in Rust as one batch."""
        # A new table is returned, because another thread may replace the shared one at any time.
        seen = self._seen
        found = {word: seen.get(word, ()) for word in words}
        new = [word for word, ids in found.items() if not ids]
        if new:
            fresh = dict(zip(new, (e.ids for e in self._rust.encode_batch_fast(new)), strict=True))
            self._remember(fresh)
            found.update(fresh)
        return found

    def _remember(self, fresh: Mapping[str, Sequence[int]]) -> None:
        short = [(word, ids) for word, ids in fresh.items() if len(word) <= _MAX_SEEN_LENGTH]
        if len(self._seen) + len(short) > _MAX_SEEN:
            self._seen = dict(_SPECIAL)
        self._seen.update(short[: _MAX_SEEN - len(self._seen)])


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Returns (entries in the order of their ids, merges by rank). Start and end, the next two ids, are excluded."""
    byte_of, merges = _byte_alphabet(), _read_merges()
    return [*byte_of, *(c + _WORD_END for c in byte_of), *(a + b for a, b in merges)], merges


@lru_cache(maxsize=1)
def _word_encoder() -> _WordEncoder:
    """Returns the word encoder. Loads the merge table once per process."""
    return _WordEncoder()


def _read_merges() -> list[tuple[str, str]]:
    """Reads the merges by rank. The first line of the file is a header, and CLIP never used its tail."""
    with gzip.open(_MERGES_FILE, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : 1 + _N_MERGES]
    pairs = (line.split() for line in lines)
    return [(left, right) for left, right in pairs]


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each of the 256 characters that represent bytes, in the order of their ids.

    Bytes that are visible Latin-1 characters come first, as these characters; the others follow as U+0100 onwards.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _piece_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    """Returns the UTF-8 bytes of a vocabulary entry, with a space in place of the end-of-word mark."""
    stem = token.removesuffix(_WORD_END)
    return bytes(byte_of[c] for c in stem) + (b" " if stem != token else b"")


def repaired(text: str) -> str:
    """Repairs broken Unicode and decodes HTML escapes. Callers bound the length: ftfy's time may be quadratic in it."""
    # Printable ASCII without "&" needs no repair; skipping it makes the whole call 3 times as fast.
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    import ftfy  # takes 30 ms

    # Twice, because text from the web is often escaped twice ("&amp;amp;").
    return html.unescape(html.unescape(ftfy.fix_text(_AMPERSANDS.sub(r"\1", text))))


def _clean(text: str) -> str:
    """Repairs a text, collapses white space to single spaces and converts to lower case."""
    return " ".join(repaired(text).split()).lower()


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Rule for the last token of a text: the first end token, or else the last that is not padding. Without both ids
    it is the last position of the context, so that padding counts as text.

    Shape suffixes: B batch, L length of the context.
    """

    end_id: int | None = None
    pad_id: int | None = None

    def positions(self, tokens_BL: Tensor) -> Tensor:
        """Returns the position of each text's last token, [B]."""
        if self.end_id is not None:
            return (tokens_BL == self.end_id).int().argmax(dim=1)  # argmax returns the first of equal values
        if self.pad_id is not None:
            return (tokens_BL != self.pad_id).sum(1).sub(1).clamp(min=0)
        return tokens_BL.new_full((len(tokens_BL),), tokens_BL.shape[1] - 1)


def check_texts(texts: Sequence[str]) -> None:
    """Raises TypeError for other than a sequence of str."""
    if isinstance(texts, str):
        raise TypeError("texts is one str, must be a sequence of str: pass [text]")
    if not isinstance(texts, Sequence):
        raise TypeError(f"texts is {type(texts).__name__}, must be a sequence of str: pass a list")
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{position}] is {type(text).__name__}, must be str: pass only str")
