"""What a benchmark found: figures, tables, a picture; and the numbers that they are made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class Table:
    """What a person reads. Cells are text already; the first columns name a row, the others hold numbers."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """What a benchmark found."""

    figures: dict[str, Any]  # the headline numbers and ratios: with name and folder, the last line of the output
    details: Any  # everything that was measured, for results.json
    tables: Sequence[Table]
    picture: bytes | None = None  # PNG


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    """Of each contestant's rounds, to four digits."""
    return {name: rounded(statistics.median(rounds)) for name, rounds in times.items()}


def rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")
