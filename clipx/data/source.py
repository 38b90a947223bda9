"""Sources: samples by index, opened with their number and read at random."""

from __future__ import annotations

import math
import os
import random
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

from clipx.data.shards.packed import Packed
from clipx.errors import require

MAX_BYTES = 1 << 28  # of an encoded image: 256 MiB, far above any photograph; more is a file of another kind
MAX_TEXT = 1 << 24  # bytes of captions and what else is text about an image: Python makes of JSON ten times as many


class BadSample(Exception):
    """A sample that cannot be used. The message is the reason, the same for the same fault where it can be."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line of the quarantine file: where the sample is and why it is not used."""

    key: str
    reason: str


def without_numbers(reason: str) -> str:
    """A reason without its numbers, so that the same faults are counted together."""
    return re.sub(r"\d[\d,.x]*", "…", reason)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as stored: `image` is encoded, there is at least one caption, `label` is an index or a class name.

    Where captions come from several keys, `captions_by_key` has those of each key, with the key's weight.
    """

    image: bytes
    captions: Sequence[str]
    label: int | str | None = None
    captions_by_key: Sequence[tuple[float, Sequence[str]]] = ()

    def draw_caption(self, rng: random.Random) -> str:
        """Draws a key by its weight, where there are several, and one of its captions uniformly."""
        if not self.captions_by_key:
            return rng.choice(self.captions)
        ((_, captions),) = rng.choices(self.captions_by_key, [weight for weight, _ in self.captions_by_key])
        return rng.choice(captions)


def read_bounded(path: str, what: str = "image", limit: int = MAX_BYTES) -> bytes:
    """The content of a plain file of at most `limit` bytes. Raises BadSample for anything else."""
    try:
        with open(path, "rb", buffering=0, opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadSample(f"{what} is no plain file")
            if status.st_size > limit:
                raise BadSample(f"{what} is larger than {limit >> 20} MiB")
            return file.read(status.st_size) or b""
    except (OSError, ValueError) as error:  # ValueError: the path holds a zero byte
        raise BadSample(f"{what} cannot be read: {getattr(error, 'strerror', error)}") from None


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else a named pipe waits for a writer


class Source(Protocol):
    """Samples 0..n-1 in shards, read at random. Pickled to loader workers, so it holds no open files."""

    @property
    def sizes(self) -> Sequence[int]:
        """Samples in each shard; their sum is the number of samples. Samples of a shard are cheap to read together."""

    @property
    def bad(self) -> Sequence[BadRecord]:
        """The samples that were found unusable on opening. `sizes` does not count them."""

    @property
    def fingerprint(self) -> str:
        """A digest that changes when the data does, and not when it is moved or copied."""

    def key(self, index: int) -> str:
        """The name of a sample, also of one that cannot be read."""

    def read(self, index: int) -> Sample:
        """The sample at an index. Raises BadSample."""


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A source that can request samples before they are read."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Requests the samples that this process reads next."""


def prefetch_samples(source: Source, indices: Sequence[int]) -> None:
    """Calls `source.prefetch(indices)` where the source has it."""
    if isinstance(source, SupportsPrefetch):
        source.prefetch(indices)


@dataclass(frozen=True, slots=True)
class WrappedSource:
    """The samples of another source, changed as they are read. A subclass defines `read`."""

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

    def key(self, index: int) -> str:
        return self.source.key(index)

    def read(self, index: int) -> Sample:
        raise NotImplementedError

    def prefetch(self, indices: Sequence[int]) -> None:
        prefetch_samples(self.source, indices)


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """What sources of image files have in common. Their order is mixed over all files, which costs files nothing."""

    folder: str
    images: Packed[str]  # paths in the folder
    bad: Sequence[BadRecord]
    fingerprint: str

    @property
    def sizes(self) -> Sequence[int]:
        """Shards of 100 images each, in name only."""
        full, rest = divmod(len(self.images), 100)
        return [100] * full + [rest] * (rest > 0)

    def key(self, index: int) -> str:
        return os.path.join(self.folder, self.images[index])  # noqa: PTH118


@dataclass(frozen=True, slots=True)
class Split:
    """One side of a source of which `held` in every `of` consecutive samples are held out, evenly spread.

    On each side the indices are consecutive, so that per-sample state wastes nothing.
    """

    source: Source
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
        return () if self.held_out else self.source.bad  # reported once

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}-{'held' if self.held_out else 'kept'}-{self.held}-of-{self.of}"

    def _source_index(self, index: int) -> int:
        """The index in the source of a sample of this side: `_held_before` and its complement, inverted."""
        if self.held_out:
            return -((index + 1) * self.of // -self.held) - 1
        return index * self.of // (self.of - self.held)

    def key(self, index: int) -> str:
        return self.source.key(self._source_index(index))

    def read(self, index: int) -> Sample:
        return self.source.read(self._source_index(index))

    def prefetch(self, indices: Sequence[int]) -> None:
        prefetch_samples(self.source, [self._source_index(index) for index in indices])


def split(source: Source, share: float) -> tuple[Source, Source | None]:
    """(training side, held-out side) of a source; nothing is held out at share 0 or from fewer than 1/share samples."""
    ratio = Fraction(share).limit_denominator(1_000_000)
    if not ratio:
        return source, None
    kept, held_out = (Split(source, ratio.numerator, ratio.denominator, held_out=side) for side in (False, True))
    return kept, held_out if sum(held_out.sizes) else None


def check_held_out_share(share: float) -> None:
    require(0 <= share <= 0.5, f"data.held_out_share={share} must lie in [0, 0.5]: 0.05 holds out every 20th sample")


def check_key(key: str, value: str | None, member: str) -> None:
    require(
        value is None or value == member or value.startswith("json."),
        f"{key}={value} names no member that is read: give {member}, or json.KEY",
    )


def caption_weights(key: str, value: Any) -> dict[str, float]:
    """The keys that captions are drawn from, by name, each with its weight. Raises ConfigError.

    `value` is that of the option `key`: the name of one, or a weight for each of several.
    """
    require(
        bool(value) and isinstance(value, str | dict),
        f"{key}={value} names no caption: give txt, json.KEY, or several with weights, {{txt:0.3,json.KEY:0.7}}",
    )
    weights: dict[str, Any] = value if isinstance(value, dict) else {value: 1.0}
    for name, weight in weights.items():
        check_key(key, str(name), "txt")
        require(
            type(weight) in (int, float) and 0 < weight < math.inf,
            f"{key}.{name}={weight} must be a finite number above 0: to draw no caption from it, leave it out",
        )
    require(sum(weights.values()) < math.inf, f"{key}={value} adds up to more than a number can hold: give small ones")
    return {name: float(weights[name]) for name in sorted(weights)}


def caption_text(caption: bytes | str) -> str:
    """Raises BadSample where a caption is not UTF-8, or says nothing."""
    try:
        # A str may hold half a surrogate pair, from a damaged escape in JSON: no tokenizer takes it.
        text = (caption if isinstance(caption, bytes) else caption.encode()).decode().strip()
    except UnicodeError:
        raise BadSample("caption is not UTF-8") from None
    if not text:
        raise BadSample("caption is empty")
    return text


def parse_label(text: str) -> int | str:
    """An index where the text is a whole number, else a class name. Raises BadSample where there is none."""
    text = text.strip()
    if not text:
        raise BadSample("label is missing")
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text
