"""Axes of parallel coordinates, drawn by parallel.js: an axis for each override, a line for each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_MOST_LABELS = 12  # values of an axis that have a label each; axes of more numbers have ticks


def numbers_of(texts: Sequence[str]) -> dict[str, float] | None:
    """Returns the numbers that texts represent. None if one of them is not a finite number."""
    try:
        found = {text: float(text) for text in texts}
    except ValueError:
        return None
    return found if all(map(math.isfinite, found.values())) else None


def log_spaced(values: Sequence[float]) -> bool:
    """Returns True if sorted values are spaced more evenly by logarithm; for two values, if their ratio is >= 10."""
    if values[0] <= 0 or len(values) < 2:
        return False
    if len(values) == 2:
        return values[1] / values[0] >= 10
    steps, ratios = np.diff(values), np.diff(np.log(values))
    return bool(ratios.std() / ratios.mean() < steps.std() / steps.mean())


def override_axis(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Returns the axis of an override: numbers by value, or logarithm if that spaces them more evenly; else texts."""
    numbers = numbers_of(texts)
    if numbers is not None:
        typed = {value: text for text, value in numbers.items()}
        return number_axis(name, [numbers[text] for text in texts], typed.__getitem__, log_spaced(sorted(typed)))
    words = list(dict.fromkeys(texts))
    places = {word: round(1 - (i + 0.5) / len(words), 4) for i, word in enumerate(words)}
    return {"name": name, "at": [places[text] for text in texts], "labels": [[at, word] for word, at in places.items()]}


def number_axis(
    name: str, values: Sequence[float | None], text: Callable[[float], str], log: bool = False
) -> dict[str, Any]:
    """Returns an axis of numbers: places from 0 to 1, null without a value. `range` instead of labels: for ticks."""
    scale = math.log if log else float
    known = sorted({value for value in values if value is not None})
    low, width = scale(known[0]), scale(known[-1]) - scale(known[0])
    places = {value: round((scale(value) - low) / width, 4) if width else 0.5 for value in known}
    found = {"name": f"{name} (log)" if log else name, "at": [None if v is None else places[v] for v in values]}
    if len(known) > _MOST_LABELS:
        return {**found, "log": log, "range": [known[0], known[-1]]}
    return {**found, "labels": [[places[value], text(value)] for value in known]}
