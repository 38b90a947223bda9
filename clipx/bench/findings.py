"""Results of a benchmark: figures and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class Table:
    """Table of text cells for the terminal. The first columns name a row, the others contain numbers."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """Results of a benchmark."""

    figures: dict[str, Any]  # headline numbers and ratios; the last line of the output has them with name and folder
    details: Any  # all measurements, for results.json
    tables: Sequence[Table]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median over the rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    """Returns the median of each implementation's rounds, rounded to four digits."""
    return {name: rounded(statistics.median(rounds)) for name, rounds in times.items()}


def rounded(value: float) -> float:
    """Rounds to four digits."""
    return float(f"{value:.4g}")
