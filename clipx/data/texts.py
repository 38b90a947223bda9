"""Texts of a batch: the drawn captions of its samples in the tokens of the model and of a live teacher."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import regex
import torch
from torch import Tensor

from clipx.data.augment_spec import CaptionMaskSpec, CaptionRule
from clipx.data.inputs import Texts
from clipx.errors import ConfigError
from clipx.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from clipx.data.source import Sample
    from clipx.data.spec import DataSpec
    from clipx.model.packing import TextPacker


@dataclass(frozen=True, slots=True)
class TeacherTexts:
    """Tokens of a live teacher. None as packer: it takes tokens."""

    tokenizer: Tokenizer
    packer: TextPacker | None = None


@dataclass(frozen=True, slots=True)
class TextReader:
    """Makes the texts of a batch. Pickled to loader processes. A sample has `each` captions. A teacher reads the first
    of them, and as a whole where a mask leaves words out."""

    tokenizer: Tokenizer
    each: int = 1
    compared: bool = False  # whether the objective compares captions
    mask: CaptionMaskSpec | None = None  # None: the first tokens of each caption
    packer: TextPacker | None = None  # None: the model takes tokens
    teacher: TeacherTexts | None = None

    def draw(self, sample: Sample, rng: random.Random) -> list[str]:
        """Draws the captions of a sample."""
        return sample.draw_captions(rng, self.each)

    def __call__(self, captions: Sequence[str], positions: Iterable[int], seed: int) -> Texts:
        """Returns the texts of the drawn captions of the samples at these positions, sample by sample."""
        places = itertools.product(positions, range(self.each))
        shown = [self.shown(text, seed, *place) for place, text in zip(places, captions, strict=True)]
        rows, packers = [self.tokenizer(shown)], [self.packer]
        if self.teacher is not None:
            rows.append(self.teacher.tokenizer(captions[:: self.each]))
            packers.append(self.teacher.packer)
        digests = None
        if self.compared:
            digests = caption_digests(rows[0] if self.mask is None else self.tokenizer(captions), self.each)
        return Texts(tuple(rows), self.each, tuple(packers) if any(packers) else (), digests=digests)

    def shown(self, caption: str, seed: int, position: int, number: int = 0) -> str:
        """Returns the words that the text tower reads of the drawn caption `number` of the sample at a position."""
        if self.mask is None:
            return caption

        return masked(caption, self.mask, self.tokenizer, f"{seed}/{position}/caption/{number}")


def text_reader_of(
    data: DataSpec, tokenizer: Tokenizer, packer: TextPacker | None = None, compared: bool = False
) -> TextReader:
    """Returns the reader of training texts of data. Loads what the selection of words needs. Raises ConfigError.
    `packer`: of the model. `compared`: whether the objective compares captions."""
    return TextReader(tokenizer, data.captions_per_step, compared, used_mask(data.caption_mask), packer)


def text_bytes(data: DataSpec, context_length: int) -> int:
    """Returns the bytes of the tokens of a sample."""
    return torch.int64.itemsize * context_length * data.captions_per_step


def used_mask(mask: CaptionMaskSpec) -> CaptionMaskSpec | None:
    """Returns None for a mask that keeps the first tokens of a caption. Loads what others need. Raises ConfigError."""
    if not mask.active:
        return None

    if mask.rule is CaptionRule.syntax:
        tagger()  # now, so that loader processes share its memory
    return mask


def caption_digests(tokens_bL: Tensor, each: int) -> Tensor:
    """Returns a 64-bit digest of the tokens of each text, [b, each] int64: texts of equal tokens have equal digests."""
    rows = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in tokens_bL.numpy())
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.int64).copy()).view(-1, each)


# ------------------------------------------------------------------------------------------ words that are kept


_MOST_WORDS = 1000  # read of a caption: a text of a web page may have megabytes
_TAGGED = 20  # characters of a word that are tagged: the time is quadratic in them
_KINDS = (("NN", "NP"), ("AJ",), ("V",))  # tags of nouns, adjectives and verbs begin with these: CLAWS 5
_WORD = regex.compile(
    r"\s*(?:[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
    r"|[^\s\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]+)"
)
"""A word with the white space before it."""


def masked(caption: str, spec: CaptionMaskSpec, tokenizer: Tokenizer, seed: str) -> str:
    """Returns the words of a caption that `spec` keeps. `seed`: of the draws."""
    special, found = len(tokenizer.encode("")), len(tokenizer.encode(caption))
    share, context = max(1, math.ceil(spec.share * (found - special))), tokenizer.context_length - special
    budget = min(context, share, context if spec.tokens is None else spec.tokens)
    if found - special <= budget:
        return caption
    # Without white space at the end, of which each character would be a start of a word that never comes.
    found_words = _WORD.finditer(caption[: tokenizer.read_characters].rstrip())
    words = [match[0] for match in islice(found_words, _MOST_WORDS)]
    counts = [len(tokenizer.encode(word.strip())) - special for word in words]
    kept = sorted(_kept(spec.rule, words, counts, budget, random.Random(seed)))
    return "".join(words[place] for place in kept).strip()


def _kept(rule: CaptionRule, words: Sequence[str], counts: Sequence[int], budget: int, rng: random.Random) -> list[int]:
    """Returns the places of the words that are kept: as many as fit, and at least one."""
    places = list(range(len(words)))
    if rule in (CaptionRule.truncate, CaptionRule.block):  # up to the first word that does not fit
        places = places[rng.randint(0, _last_start(counts, budget)) if rule is CaptionRule.block else 0 :]
        sums = accumulate(counts[place] for place in places)
        return [place for place, total in zip(places, sums, strict=True) if total <= budget] or places[:1]
    if rule is CaptionRule.random:
        rng.shuffle(places)
    else:
        kinds = kinds_of([word.strip() for word in words])
        places.sort(key=lambda place: kinds[place])
    kept: list[int] = []
    for place in places:
        if counts[place] <= budget:
            kept.append(place)
            budget -= counts[place]
    return kept or places[:1]


def _last_start(counts: Sequence[int], budget: int) -> int:
    """Returns the first place from which on all words fit: later blocks would be shorter."""
    fitting = sum(total <= budget for total in accumulate(reversed(counts)))
    return max(0, len(counts) - max(fitting, 1))


# -------------------------------------------------------------------------------------------------------------- syntax


def kinds_of(words: Sequence[str]) -> list[int]:
    """Returns the kind of each word of an English sentence: 0 noun, 1 adjective, 2 verb, 3 other."""
    bare = [regex.sub(r"^[^\p{L}\p{N}]+|[^\p{L}\p{N}]+$", "", word)[:_TAGGED] or "." for word in words]
    return [
        next((kind for kind, names in enumerate(_KINDS) if tag.startswith(names)), len(_KINDS))
        for tag in tagger().tag_sent(bare, taglevel=0)
    ]


@lru_cache(maxsize=1)
def tagger() -> Any:
    """Returns HanTa's tagger of English words, with the model in its wheel. Raises ConfigError if it is missing."""
    try:
        from HanTa import HanoverTagger
    except ImportError as error:
        raise ConfigError(
            "data.caption_mask.rule=syntax needs the package HanTa, which is not installed: pip install 'clipx[syntax]'"
        ) from error
    # The whole path: HanTa unpickles a file of this name in the working directory first.
    return HanoverTagger.HanoverTagger(str(Path(HanoverTagger.__file__).with_name("morphmodel_en.pgz")))
