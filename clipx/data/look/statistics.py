"""Statistics of the measured samples: what the page shows and the findings are computed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clipx.data.look.hashing import Numbers, exact_duplicates, groups_of, near_duplicates
from clipx.data.look.measure import CAPTION, SAMPLE, Chunk
from clipx.data.look.scripts import ALL
from clipx.data.source import BadRecord, without_numbers

_EXAMPLES = 3  # samples named for each reason
_PLAIN = 4  # largest difference of colours, of 255, in a picture of one colour


@dataclass(slots=True)
class Reason:
    """Unusable samples with a common reason: their number, the reason of the first, and the names of some."""

    text: str
    samples: int
    examples: list[str]


@dataclass(frozen=True, slots=True)
class ScriptCount:
    """Captions of a script: their number, mean number of tokens, and number of cut-off ones."""

    name: str
    captions: int
    mean_tokens: float
    cut: int


@dataclass(frozen=True, slots=True)
class RepeatedCaption:
    """Caption that occurs several times: its number of occurrences, and its place (sample, number)."""

    count: int
    index: int
    number: int


@dataclass(frozen=True)
class Statistics:
    """Measurements of all samples. `context`: model.text.context_length; `no_tokens`: length of a text without words.

    `opened`: reasons of the samples of the whole set that were found unusable on opening; `read`: of those read here.
    """

    samples: NDArray[np.void]
    captions: NDArray[np.void]
    labels: Counter[int | str | None]
    opened: Sequence[Reason]
    read: Sequence[Reason]
    context: int
    no_tokens: int
    near_bits: int

    @classmethod
    def of(
        cls, chunks: Iterable[Chunk], opened: Iterable[BadRecord], context: int, no_tokens: int, near_bits: int
    ) -> Statistics:
        """Joins the measurements."""
        samples, captions = [np.empty(0, SAMPLE)], [np.empty(0, CAPTION)]
        labels, read = Counter[int | str | None](), dict[str, Reason]()
        for chunk in chunks:
            samples.append(chunk.samples)
            captions.append(chunk.captions)
            labels.update(chunk.labels)
            _count(read, chunk.bad)
        on_opening = dict[str, Reason]()
        _count(on_opening, opened)
        return cls(
            samples=np.concatenate(samples),
            captions=np.concatenate(captions),
            labels=labels,
            opened=_sorted(on_opening),
            read=_sorted(read),
            context=context,
            no_tokens=no_tokens,
            near_bits=near_bits,
        )

    @property
    def bad(self) -> int:
        """Number of samples that were read and cannot be used."""
        return sum(reason.samples for reason in self.read)

    @property
    def seen(self) -> int:
        """Number of samples that were read."""
        return len(self.samples) + self.bad

    # ------------------------------------------------------------------------------------------------- images

    @cached_property
    def shorter_sides(self) -> Numbers:
        sides: Numbers = np.minimum(self.samples["width"], self.samples["height"])
        return sides

    @cached_property
    def aspects(self) -> NDArray[np.float64]:
        """Width divided by height."""
        ratios: NDArray[np.float64] = self.samples["width"] / self.samples["height"]
        return ratios

    @cached_property
    def plain(self) -> int:
        """Number of pictures of one colour."""
        areas = self.samples["colours"].reshape(len(self.samples), -1, 3).astype(np.int16)
        if not len(areas):
            return 0
        return int(((areas.max(axis=1) - areas.min(axis=1)).max(axis=1) <= _PLAIN).sum())

    @cached_property
    def exact_groups(self) -> list[list[int]]:
        """Groups of rows of `samples` with the same encoded image."""
        return groups_of(self._first_equal)

    @cached_property
    def near_groups(self) -> list[list[int]]:
        """Groups of rows with nearly equal pictures; of equal files only the first one is a member."""
        rows = np.flatnonzero(self._first_equal == np.arange(len(self.samples)))
        distinct = self.samples[rows]
        first = near_duplicates(distinct["hash"], distinct["colours"], self.near_bits)
        return [[int(rows[number]) for number in group] for group in groups_of(first)]

    @cached_property
    def _first_equal(self) -> Numbers:
        return exact_duplicates(self.samples["digest"])

    # ----------------------------------------------------------------------------------------------- captions

    @cached_property
    def cut(self) -> NDArray[np.bool_]:
        """True for each caption that is longer than the context."""
        longer: NDArray[np.bool_] = self.captions["tokens"] > self.context
        return longer

    @property
    def without_tokens(self) -> int:
        """Number of captions with special tokens only."""
        return int((self.captions["tokens"] <= self.no_tokens).sum())

    @cached_property
    def scripts(self) -> list[ScriptCount]:
        """Scripts by their number of captions."""
        numbers = np.unique(self.captions["script"])
        rows = [(ALL[number], self.captions["script"] == number) for number in numbers]
        found = [
            ScriptCount(name, int(row.sum()), float(self.captions["tokens"][row].mean()), int(self.cut[row].sum()))
            for name, row in rows
        ]
        return sorted(found, key=lambda script: (-script.captions, script.name))

    @cached_property
    def repeated(self) -> list[RepeatedCaption]:
        """Captions that occur more than once, the most frequent first."""
        _, first, counts = self._distinct_captions
        order = np.lexsort((first, -counts))
        places = [(int(counts[row]), self.captions[first[row]]) for row in order[: int((counts > 1).sum())]]
        return [RepeatedCaption(count, int(caption["index"]), int(caption["number"])) for count, caption in places]

    @property
    def distinct_captions(self) -> int:
        return len(self._distinct_captions[0])

    @property
    def same_caption(self) -> float:
        """Estimated probability that the captions of two samples are equal."""
        counts = self._distinct_captions[2].astype(float)
        pairs = counts.sum() * (counts.sum() - 1)
        return float((counts * (counts - 1)).sum() / pairs) if pairs else 0.0

    @cached_property
    def _distinct_captions(self) -> tuple[NDArray[np.uint64], Numbers, Numbers]:
        """(digests, row of the first occurrence, number of occurrences) of the distinct captions."""
        found: tuple[NDArray[np.uint64], Numbers, Numbers] = np.unique(
            self.captions["digest"], return_index=True, return_counts=True
        )
        return found

    def longest(self, most: int) -> NDArray[np.void]:
        """Returns the cut-off captions with the most tokens."""
        order = np.argsort(-self.captions["tokens"], kind="stable")[:most]
        longest: NDArray[np.void] = self.captions[order[self.cut[order]]]
        return longest


def _count(reasons: dict[str, Reason], records: Iterable[BadRecord]) -> None:
    """Adds records to the reasons, by their text without numbers, as the quarantine does."""
    for record in records:
        reason = reasons.setdefault(without_numbers(record.reason), Reason(record.reason, 0, []))
        reason.samples += 1
        if len(reason.examples) < _EXAMPLES:
            reason.examples.append(record.key)


def _sorted(reasons: dict[str, Reason]) -> list[Reason]:
    return sorted(reasons.values(), key=lambda reason: (-reason.samples, reason.text))
