"""Counts of unusable samples by reason, and the limit on their share."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from clipx.data.source import BadRecord, count_reasons, without_numbers
from clipx.errors import DataError

_MIN_SAMPLES = 1000  # read before the share of bad samples is checked: fewer give no reliable share
_MAX_KEYS = 100_000  # samples of a reason whose names are stored, over all ranks: bounds what the ranks gather


@dataclass(frozen=True, slots=True)
class BadCount:
    """Bad samples of a reason, over all ranks: how often they were drawn, and how many they are."""

    reason: str
    draws: int
    samples: int
    exact: bool  # True: `samples` is the exact number. False: there are at least so many

    def __str__(self) -> str:
        samples = f"{'' if self.exact else 'at least '}{self.samples:,} sample{'s' if self.samples > 1 else ''}"
        return f"{samples}, drawn {self.draws:,} times: {self.reason}"


@dataclass(slots=True)
class BadSampleCounter:
    """Counts of good and bad samples on this rank since it started. `limit` is data.max_bad_share, `samples` the number
    of samples that this rank reads in an epoch."""

    limit: float
    samples: int
    world: int = 1
    seen: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # reason -> number of draws
    _keys: dict[str, set[bytes]] = field(default_factory=dict)  # reason -> digests of the names

    def count(self, good: int, bad: Sequence[BadRecord]) -> None:
        """Adds to the counts. Raises DataError when the share of bad samples exceeds the limit."""
        self.seen += good
        for item in bad:
            reason = without_numbers(item.reason)
            self.bad[reason] += 1
            keys = self._keys.setdefault(reason, set())
            if len(keys) < self._most:
                keys.add(hashlib.blake2b(item.key.encode("utf-8", "surrogatepass"), digest_size=8).digest())
        if self.seen >= min(_MIN_SAMPLES, self.samples):
            total = self.seen + self.bad.total()
            listed = "; quarantine.jsonl in the run directory lists them"
            check_bad_share(self.bad.total(), total, self.limit, bad[:1], listed)

    @property
    def _most(self) -> int:
        return _MAX_KEYS // self.world

    @staticmethod
    def sum(counters: Sequence[BadSampleCounter]) -> list[BadCount]:
        """Returns the counts of all ranks, the most frequent reason first."""
        draws = sum((counter.bad for counter in counters), Counter[str]())
        counts = []
        for reason, drawn in draws.most_common():
            keys = [counter._keys.get(reason, set()) for counter in counters]
            exact = all(len(one) < counter._most for one, counter in zip(keys, counters, strict=True))
            counts.append(BadCount(reason, drawn, len(set[bytes]().union(*keys)), exact))
        return counts


def check_opened(bad: Sequence[BadRecord], good: int, limit: float) -> None:
    """Raises DataError when the share of samples found bad on opening exceeds the limit."""
    check_bad_share(len(bad), good + len(bad), limit, bad)


def check_bad_share(bad: int, total: int, limit: float, examples: Sequence[BadRecord], listed: str = "") -> None:
    """Raises DataError when more than the share `limit` of `total` samples are bad. `examples`: bad samples, counted by
    reason in the message. `listed`: the place of a list, for the message."""
    if bad > limit * total:
        reasons = "; ".join(count_reasons(examples, most=3))
        raise DataError(
            f"{bad:,} of {total:,} samples are bad, more than data.max_bad_share={limit}"
            f"{f' ({reasons})' if reasons else ''}{listed}: convert, correct or remove them, or raise the limit"
        )
