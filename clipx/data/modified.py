"""Training samples that options modify or leave out: short captions and small images, parts of captions (runs of
sentences), captions of other samples. Fingerprints are those of the source: the data is the same."""

from __future__ import annotations

import hashlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from clipx.data import transform  # noqa: F401  # lifts Pillow's limit of pixels
from clipx.data.source import BadSample, Sample, Source, WrappedSource

_ROUNDS = 4  # of the Feistel network: enough for a permutation without visible structure
_MOST = 256  # sentences of a caption; those after them are one
_CHARS = 2**16  # of a caption that are read: a damaged one may have megabytes
_RUNS_CHARS = 2**20  # of its runs: all of 257 sentences would have 700 MB
# The end of a sentence with its closing quotes or brackets, before white space; full-width marks need none.
_END = re.compile(r"""(?<=[.!?…])["'”’»)\]]*\s+|(?<=[。！？])["'”’」』）]*""")
_ABBREVIATIONS = frozenset(
    """mr mrs ms dr st mt prof jr sr vs etc e.g i.e cf vol fig ca approx dept inc ltd co corp gen col lt
    sgt""".split()
)


@dataclass(frozen=True, slots=True)
class Filtered(WrappedSource):
    """Source in which samples with an image side below `min_side`, or without a caption long enough, are bad samples.
    Shorter captions of a sample are dropped, and a key without remaining captions is not drawn."""

    min_caption_chars: int
    min_side: int

    def read(self, index: int) -> Sample:
        sample = self.source.read(index)
        captions = self._long_enough(sample.captions)
        if not captions:
            longest = max(map(len, sample.captions))
            raise BadSample(
                f"caption has {longest} characters, fewer than data.min_caption_chars={self.min_caption_chars}"
            )
        if self.min_side:
            width, height = _size(sample.image)
            if min(width, height) < self.min_side:
                raise BadSample(f"image has {width}x{height} pixels, a side below data.min_side={self.min_side}")
        captions_by_key = [
            (weight, long) for weight, captions in sample.captions_by_key if (long := self._long_enough(captions))
        ]
        return replace(sample, captions=captions, captions_by_key=captions_by_key)

    def _long_enough(self, captions: Sequence[str]) -> list[str]:
        return [caption for caption in captions if len(caption) >= self.min_caption_chars]


def _size(encoded: bytes) -> tuple[int, int]:
    """Returns (width, height) from the header alone; maximal values if it is unreadable: decoding reports the fault."""
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "WEBP")) as image:
            return image.size
    except Exception:  # decoders raise undocumented exceptions on damaged input
        return sys.maxsize, sys.maxsize


# ------------------------------------------------------------------------------------------------------- sub-captions


@dataclass(frozen=True, slots=True)
class SubCaptions(WrappedSource):
    """Source whose samples draw runs of at most `most` sentences of their captions: data.sub_captions."""

    most: int

    def read(self, index: int) -> Sample:
        return replace(self.source.read(index), sub_captions=self.most)


def sentences(text: str) -> list[str]:
    """Splits a text at its lines and at the ends of its sentences, but not after abbreviations and initials. Returns at
    least one, and at most 257."""
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


# ------------------------------------------------------------------------------------------------- mismatched captions


@dataclass(frozen=True, slots=True)
class Mismatched(WrappedSource):
    """Source in which exactly round(share · n) of the n samples have the captions of another sample.

    Those samples form one cycle in random order, each with the captions of the next. The cycle is a pure function of
    the seed and n, computed in constant memory.
    """

    order: Permutation
    exchanged: int

    @classmethod
    def of(cls, source: Source, share: float, seed: int) -> Mismatched:
        order = Permutation(sum(source.sizes), f"mismatched/{seed}")
        return cls(source, order, round(share * order.size))

    def read(self, index: int) -> Sample:
        sample, partner = self.source.read(index), self.partner(index)
        if partner == index:
            return sample
        other = self.source.read(partner)
        return replace(sample, captions=other.captions, captions_by_key=other.captions_by_key)

    def partner(self, index: int) -> int:
        """Returns the sample whose captions a sample has; `index` itself for a sample that is not exchanged."""
        rank = self.order(index)
        return index if rank >= self.exchanged else self.order.inverse((rank + 1) % self.exchanged)


@dataclass(frozen=True, slots=True)
class Permutation:
    """Pseudo-random permutation of 0..size-1 with random access, in constant memory. A Feistel network over the
    smallest even number of bits that holds size; numbers out of range are permuted again."""

    size: int
    key: str

    def __call__(self, value: int) -> int:
        return self._walk(value, range(_ROUNDS))

    def inverse(self, value: int) -> int:
        return self._walk(value, range(_ROUNDS - 1, -1, -1))

    def _walk(self, value: int, rounds: range) -> int:
        half = (max(self.size - 1, 1).bit_length() + 1) // 2
        mask = (1 << half) - 1
        while True:
            left, right = value >> half, value & mask
            if rounds.step < 0:
                left, right = right, left
            for number in rounds:
                left, right = right, left ^ (self._hash(number, right) & mask)
            if rounds.step < 0:
                left, right = right, left
            value = left << half | right
            if value < self.size:
                return value

    def _hash(self, number: int, right: int) -> int:
        text = f"{self.key}/{number}/{right}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
