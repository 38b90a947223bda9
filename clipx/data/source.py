"""Sources: samples by index. Opening one says how many there are; reading one costs the same anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class BadSample(Exception):
    """A sample that cannot be used. The message is the reason, alike for alike faults where it can be."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A line of the quarantine file: where the sample is and why it is not used."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as stored: `key` names it to a person, `image` is encoded, `label` an index or a class name."""

    key: str
    image: bytes
    captions: Sequence[str]
    label: int | str | None = None


class Source(Protocol):
    """Samples 0..n-1 in shards, read at random. Pickled to loader workers, so it holds no open files."""

    @property
    def sizes(self) -> Sequence[int]:
        """Samples in each shard; their sum is the number of samples."""

    @property
    def bad(self) -> Sequence[Bad]:
        """What was found unusable on opening, and is not counted in `sizes`."""

    @property
    def fingerprint(self) -> str:
        """Changes when the data does."""

    def key(self, index: int) -> str:
        """The name of a sample, also of one that cannot be read."""

    def read(self, index: int) -> Sample:
        """Raises BadSample."""


@dataclass(frozen=True, slots=True)
class Split:
    """Either side of a source from which every `every`-th sample is held out.

    Within the training side the indices are consecutive, so that per-sample state wastes nothing.
    """

    source: Source
    every: int
    held_out: bool

    @property
    def sizes(self) -> Sequence[int]:
        sizes, start = [], 0
        for size in self.source.sizes:
            held = (start + size) // self.every - start // self.every
            sizes.append(held if self.held_out else size - held)
            start += size
        return sizes

    @property
    def bad(self) -> Sequence[Bad]:
        return () if self.held_out else self.source.bad  # told once

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}-{'held' if self.held_out else 'kept'}-{self.every}"

    def _place(self, index: int) -> int:
        """The last of each `every` samples is held out."""
        return (index + 1) * self.every - 1 if self.held_out else index + index // (self.every - 1)

    def key(self, index: int) -> str:
        return self.source.key(self._place(index))

    def read(self, index: int) -> Sample:
        return self.source.read(self._place(index))


def split(source: Source, share: float) -> tuple[Source, Source | None]:
    """(training side, held-out side) of a source; nothing is held out at share 0 or from fewer than 1/share samples."""
    if share == 0:
        return source, None
    every = max(2, round(1 / share))
    held_out = Split(source, every, held_out=True)
    return Split(source, every, held_out=False), held_out if sum(held_out.sizes) else None


def caption_text(encoded: bytes) -> str:
    """Raises BadSample where it is not UTF-8, or says nothing."""
    try:
        text = encoded.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadSample(f"caption is not UTF-8 (byte {error.start})") from None
    if not text:
        raise BadSample("caption is empty")
    return text
