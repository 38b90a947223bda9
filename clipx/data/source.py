"""Sources: samples by index. Opening a source counts its samples; reading is random access."""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clipx.errors import require
from clipx.storage.safe_json import read_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES = 1 << 28  # limit of an encoded image: 256 MiB, far above any photograph; a larger file is not an image
_LARGEST_LABEL = 1 << 63  # above all indices
MAX_TEXT = 1 << 24  # limit of an image's text members in bytes: parsed JSON takes ten times as much memory


class BadSample(Exception):
    """Raised for an unusable sample. The message is the reason, with the same words for the same fault if possible."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line of the quarantine file: the location of a sample and the reason why it is not used.

    Also a remark on a file as a whole.
    """

    key: str
    reason: str


def without_numbers(reason: str) -> str:
    """Returns a reason without its numbers, so that equal faults are counted together."""
    return re.sub(r"\d[\d,.x]*", "…", reason)


def count_reasons(records: Sequence[BadRecord], most: int = 10) -> list[str]:
    """Returns a line for each reason: its count, its text and the location of an example."""
    examples: dict[str, BadRecord] = {}
    counts = Counter[str]()
    for record in records:
        reason = without_numbers(record.reason)
        examples.setdefault(reason, record)
        counts[reason] += 1
    lines = [
        f"{count:,} × {examples[reason].reason}: {examples[reason].key}" + (" …" if count > 1 else "")
        for reason, count in counts.most_common(most)
    ]
    return lines + ([f"and {len(counts) - most} more reasons"] if len(counts) > most else [])


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample as stored: an encoded `image`, at least one caption, and a `label` that is an index or a class name.

    If captions come from several keys, `captions_by_key` has (weight, captions) of each key. `sub_captions`: largest
    number of sentences of a drawn caption; 0: whole captions.
    """

    image: bytes
    captions: Sequence[str]
    label: int | str | None = None
    captions_by_key: Sequence[tuple[float, Sequence[str]]] = ()
    sub_captions: int = 0

    def draw_captions(self, rng: random.Random, count: int = 1) -> list[str]:
        """Draws `count` captions: each time a key by weight if there are several, then one of its captions uniformly,
        then one of the sub-captions of this caption uniformly, without those drawn before."""
        drawn = [self._draw(rng, ())]
        while len(drawn) < count and any(self._left(caption, drawn) for caption in self.captions):
            drawn.append(self._draw(rng, drawn))
        return [drawn[i % len(drawn)] for i in range(count)]

    def _draw(self, rng: random.Random, drawn: Sequence[str]) -> str:
        """Draws a caption or a sub-caption that is not among the `drawn` ones."""
        by_key = [
            (weight, left)
            for weight, captions in self.captions_by_key or [(1.0, self.captions)]
            if (left := [texts for caption in captions if (texts := self._left(caption, drawn))])
        ]
        captions = by_key[0][1]
        if self.captions_by_key:
            ((_, captions),) = rng.choices(by_key, [weight for weight, _ in by_key])
        texts = rng.choice(captions)
        return rng.choice(texts) if len(texts) > 1 else texts[0]

    def _left(self, caption: str, drawn: Sequence[str]) -> list[str]:
        texts = [caption]
        if self.sub_captions:
            from clipx.data.modified import sub_captions

            texts = sub_captions(caption, self.sub_captions)
        return [text for text in texts if text not in drawn]


def read_bounded(path: str, what: str = "image", limit: int = MAX_BYTES) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes. Raises BadSample for anything else."""
    try:
        return read_regular(Path(path), limit)
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        raise BadSample(f"{what} cannot be read: {getattr(error, 'strerror', error)}") from None


class Source(Protocol):
    """Samples 0..n-1 in shards, with random access. Pickled to loader processes, so it must not hold open files.

    Args:
        index: number of a sample in `[0, sum(sizes))`, for `key` and `read`.

    Raises:
        BadSample: `read` finds a sample that cannot be used. It is replaced, counted and listed in quarantine.jsonl.

    Example:
        A source of two shards, and a half of it that is held out:

            >>> from clipx.data import Sample, split
            >>> class Colors:
            ...     sizes, bad, fingerprint = (2, 2), (), "colors-v1"
            ...     names = ("red", "green", "blue", "white")
            ...     def key(self, index):
            ...         return f"color {index}"
            ...     def read(self, index):
            ...         return Sample(image=b"", captions=[f"the color {self.names[index]}"])
            >>> kept, held_out = split(Colors(), 0.5)
            >>> kept.sizes, held_out.sizes
            ([1, 1], [1, 1])
            >>> held_out.key(0), held_out.read(0).captions
            ('color 1', ['the color green'])
    """

    @property
    def sizes(self) -> Sequence[int]:
        """Number of samples in each shard; their sum is the total. Samples of one shard are cheap to read together."""

    @property
    def bad(self) -> Sequence[BadRecord]:
        """Samples found unusable on opening. `sizes` does not count them."""

    @property
    def fingerprint(self) -> str:
        """Digest that changes when the data changes, but not when it is moved or copied."""

    def key(self, index: int) -> str:
        """Returns the name of a sample, even if it cannot be read."""

    def read(self, index: int) -> Sample:
        """Returns the sample at an index. Raises BadSample."""


def prefetch_samples(
    source: Source, indices: Sequence[int], later: Sequence[int] = (), done: Sequence[int] = ()
) -> None:
    """Requests the samples that this process reads next, by the method `prefetch` of sources that have it. `later` and
    `done` have a sample of each whole shard to fetch and to release: see ReadAhead."""
    if (prefetch := getattr(source, "prefetch", None)) is not None:
        prefetch(indices, later, done)


@dataclass(frozen=True, slots=True)
class WrappedSource:
    """Base class of sources of the samples of another source: some of them, or modified in `read`."""

    source: Source

    @property
    def sizes(self) -> Sequence[int]:
        return self.source.sizes

    @property
    def bad(self) -> Sequence[BadRecord]:
        return self.source.bad

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def cumulative_weights(self) -> NDArray[np.float64] | None:
        """Returns the running sums of the weights with which the samples are drawn. None: those of the source."""
        return None

    def source_index(self, index: int) -> int:
        """Returns the index in the source of a sample."""
        return index

    def key(self, index: int) -> str:
        return self.source.key(self.source_index(index))

    def read(self, index: int) -> Sample:
        return self.source.read(self.source_index(index))

    def prefetch(self, indices: Sequence[int], later: Sequence[int] = (), done: Sequence[int] = ()) -> None:
        prefetch_samples(
            self.source, *([self.source_index(index) for index in some] for some in (indices, later, done))
        )


def cumulative_weights(source: Source) -> NDArray[np.float64] | None:
    """Returns the running sums of the weights with which the samples of a source are drawn; None without weights."""
    while isinstance(source, WrappedSource):
        if (weights := source.cumulative_weights()) is not None:
            return weights
        source = source.source
    return None


@dataclass(frozen=True, slots=True)
class Split(WrappedSource):
    """Training or held-out side of a source: `held` of every `of` consecutive samples, evenly spread, are held out. The
    indices of each side are consecutive, so that per-sample state has no unused rows."""

    held: int
    of: int
    held_out: bool

    @property
    def sizes(self) -> Sequence[int]:
        sizes, start = [], 0
        for size in self.source.sizes:
            held = self._held_before(start + size) - self._held_before(start)
            sizes.append(held if self.held_out else size - held)
            start += size
        return sizes

    def _held_before(self, index: int) -> int:
        return index * self.held // self.of

    @property
    def bad(self) -> Sequence[BadRecord]:
        return () if self.held_out else self.source.bad  # reported once, by the training side

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}-{'held' if self.held_out else 'kept'}-{self.held}-of-{self.of}"

    def source_index(self, index: int) -> int:
        """Returns the index in the source of a sample of this side: the inverse of `_held_before` or its complement."""
        if self.held_out:
            return -((index + 1) * self.of // -self.held) - 1
        return index * self.of // (self.of - self.held)

    def of_side(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the indices in this side of the samples on it, and whether each is: `indices` are of the source."""
        before = indices * self.held // self.of
        here = ((indices + 1) * self.held // self.of > before) == self.held_out
        return (before if self.held_out else indices - before)[here], here


def split(source: Source, share: float) -> tuple[Source, Source | None]:
    """Splits a source into (training side, held-out side)."""
    ratio = _ratio(share)
    if not ratio:
        return source, None
    kept, held_out = (Split(source, ratio.numerator, ratio.denominator, held_out=side) for side in (False, True))
    return kept, held_out if sum(held_out.sizes) else None


def kept_samples(samples: int, share: float) -> int:
    """Returns how many of `samples` `split` keeps for training."""
    return samples - samples * _ratio(share).numerator // _ratio(share).denominator


def held_shards(shards: Sequence[object], share: float) -> list[bool]:
    """Returns whether each shard is held out: a share of them, evenly spread."""
    return [int((i + 1) * share) > int(i * share) for i in range(len(shards))]


def _ratio(share: float) -> Fraction:
    return Fraction(share).limit_denominator(1_000_000)


def whole_index(source: Source, index: int) -> int:
    """Returns the number of a sample before some are selected or held out: among all samples of the data."""
    while isinstance(source, WrappedSource):
        index, source = source.source_index(index), source.source
    own = getattr(source, "whole_index", None)
    return index if own is None else int(own(index))


TABLE = "table."  # prefix of a caption key that is a column of data.caption_table


def check_key(key: str, value: str, member: str) -> None:
    """Raises ConfigError unless a value of the option `key` is the member of a sample, or json.KEY."""
    readable = value == member or value.startswith("json.")
    require(readable, f"{key}={value} is not a member that can be read: give {member}, or json.KEY")


def caption_weights(key: str, value: Any, tables: bool = False) -> dict[str, float]:
    """Returns the weight of each key that captions are drawn from, sorted by key. Raises ConfigError. `value` is the
    value of the option `key`: one key, or a dictionary from keys to weights. `tables`: whether keys may be columns of
    data.caption_table."""
    fix = "give txt, json.KEY, or several with weights, {txt:0.3,json.KEY:0.7}"
    weights = weights_of(key, value, f"names no caption: {fix}")
    for name in weights:
        if not (tables and name.startswith(TABLE)):
            check_key(key, name, "txt")
    return weights


def weights_of(key: str, value: Any, rule: str) -> dict[str, float]:
    """Returns the weight of each name of the option `key`: one name, or a dictionary from names to weights, sorted.
    `rule`: in the error of a value that is neither. Raises ConfigError."""
    require(bool(value) and isinstance(value, str | dict), f"{key}={value} {rule}")
    weights: dict[Any, Any] = value if isinstance(value, dict) else {value: 1.0}
    for name, weight in weights.items():
        require(
            type(weight) in (int, float) and 0 < weight <= sys.float_info.max,
            f"{key}.{name}={weight} must be a finite number above 0: to draw no caption from it, remove it",
        )
    require(sum(map(float, weights.values())) < math.inf, f"the sum of {key} is not finite: divide all of its weights")
    return {str(name): float(weights[name]) for name in sorted(weights, key=str)}


def caption_text(caption: bytes | str) -> str:
    """Returns a caption as text without surrounding white space. Raises BadSample if it is not UTF-8 or is empty."""
    try:
        # A str may contain half a surrogate pair, from a damaged escape in JSON: tokenizers reject it.
        text = (caption if isinstance(caption, bytes) else caption.encode()).decode("utf-8-sig").strip()
    except UnicodeError:
        raise BadSample("caption is not UTF-8") from None
    if not text:
        raise BadSample("caption is empty")
    return text


def usable_captions(value: Any) -> tuple[list[str], str]:
    """Returns the usable captions of a text or a list of texts, and the fault of another one, "" without any."""
    found, fault = list[str](), ""
    for text in value if isinstance(value, list) else [value]:
        try:
            found += [caption_text(text)] if isinstance(text, str) else []
        except BadSample as error:
            fault = str(error)
    return found, fault


def parse_label(text: str) -> int | str:
    """Returns an index if the text is an integer, else a class name. Raises BadSample if the text is empty."""
    text = text.strip()
    if not text:
        raise BadSample("label is missing")
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def whole_label(cell: Any) -> int | str | None:
    """Returns the index or the name that a cell holds. None: it is missing, or a number that is no index."""
    if cell is None or isinstance(cell, str):
        return cell
    try:
        index = int(cell)
    except (ValueError, OverflowError, TypeError):  # NaN, infinity, or an object of JSON
        return None
    return index if index == cell and abs(index) < _LARGEST_LABEL else None
