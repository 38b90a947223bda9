"""Counts of the samples that could not be used, by reason, and the limit on their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from clipx.data.source import BadRecord, without_numbers
from clipx.errors import DataError

_MIN_SAMPLES = 1000  # before a share of bad ones means something


@dataclass(slots=True)
class BadSampleCounter:
    """Counts of this rank since it started. `limit`: data.max_bad_share; `samples`: of this rank in an epoch."""

    limit: float
    samples: int
    seen: int = 0
    bad: Counter[str] = field(default_factory=Counter)  # by reason

    def count(self, good: int, bad: Sequence[BadRecord]) -> None:
        """Raises DataError where too many are bad."""
        self.seen += good
        self.bad.update(without_numbers(item.reason) for item in bad)
        if self.seen >= min(_MIN_SAMPLES, self.samples):
            check_bad_share(self.bad.total(), self.seen + self.bad.total(), self.limit, bad[:1])


def check_bad_share(bad: int, total: int, limit: float, examples: Sequence[BadRecord]) -> None:
    """Raises DataError."""
    if bad > limit * total:
        example = f", e.g. {examples[0].key}: {examples[0].reason}" if examples else ""
        raise DataError(
            f"{bad:,} of {total:,} samples are bad, more than data.max_bad_share={limit}{example}; quarantine.jsonl in "
            "the run directory names them: mend the data, or raise the limit"
        )
