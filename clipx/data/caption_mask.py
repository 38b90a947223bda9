"""Selection of the words of captions that are longer than the text tower reads (CLIPA, arXiv:2305.07017).

Words are separated by white space; each character of a script without spaces between words is a word. Whole words are
kept, as long as their tokens fit, so a text tower reads no part of a word that is not a token by itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import regex

from clipx.data.augment_spec import CaptionMaskSpec, CaptionRule
from clipx.errors import ConfigError
from clipx.model.tokenizer import Tokenizer

_MOST_WORDS = 1000  # read of a caption: a text of a web page may have megabytes
_TAGGED = 20  # characters of a word that are tagged: the time is quadratic in them
_KINDS = (("NN", "NP"), ("AJ",), ("V",))  # tags of nouns, adjectives and verbs begin with these: CLAWS 5
_WORD = regex.compile(
    r"\s*(?:[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
    r"|[^\s\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]+)"
)
"""A word with the white space before it."""


def masked(caption: str, spec: CaptionMaskSpec, tokenizer: Tokenizer, seed: str) -> str:
    """Returns the words of a caption that `spec` keeps. `seed`: of the draws.

    A caption is returned unchanged if all of its tokens are kept.
    """
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


def check_tagger(spec: CaptionMaskSpec) -> None:
    """Loads the tagger if captions need it, so that loader processes share its memory. Raises ConfigError."""
    if spec.rule is CaptionRule.syntax:
        tagger()
