"""Counts of unusable samples by reason, and the limit on their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from clipx.data.source import BadRecord, without_numbers
from clipx.errors import DataError

_MIN_SAMPLES = 1000  # read before the share of bad samples is checked: fewer give no reliable share


@dataclass(slots=True)
class BadSampleCounter:
    """Counts of good and bad samples on this rank since it started.

    `limit` is data.max_bad_share, `samples` the number of samples that this rank reads in an epoch.
    """

    limit: float
    samples: int
    seen: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # reason -> count

    def count(self, good: int, bad: Sequence[BadRecord]) -> None:
        """Adds to the counts. Raises DataError when the share of bad samples exceeds the limit."""
        self.seen += good
        self.bad.update(without_numbers(item.reason) for item in bad)
        if self.seen >= min(_MIN_SAMPLES, self.samples):
            check_bad_share(self.bad.total(), self.seen + self.bad.total(), self.limit, bad[:1])


def check_bad_share(bad: int, total: int, limit: float, examples: Sequence[BadRecord]) -> None:
    """Raises DataError when more than the share `limit` of `total` samples are bad. `examples`: for the message."""
    if bad > limit * total:
        example = f", e.g. {examples[0].key}: {examples[0].reason}" if examples else ""
        raise DataError(
            f"{bad:,} of {total:,} samples are bad, more than data.max_bad_share={limit}{example}; quarantine.jsonl in "
            "the run directory lists them: fix the data, or raise the limit"
        )
