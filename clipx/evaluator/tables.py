"""Compares the metrics of several sets, steps or models: as tables for the terminal and as values for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.evaluator.suite import Suite
from clipx.report.console import count_of, format_score, is_headline, text_table

if TYPE_CHECKING:
    from rich.table import Table

DROP = "drop"
AVERAGE, OTHERS = "average", "average of the others"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of a model, by name. `step`: step of the checkpoint, None if unknown."""

    model: str
    step: int | None
    numbers: Mapping[str, float]

    @property
    def label(self) -> str:
        """Name of the model and step, for tables and plots."""
        return self.model if self.step is None else f"{self.model}, step {self.step}"


def robustness(suite: Suite, numbers: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {evaluator: {set: {metric: value}}} for each evaluator with several sets, with rows of averages.

    The metrics of a set end with the numbers of its samples.

    Averages weight all sets equally. `drop` is the difference between the first metric of the first set and that of the
    set: for a shifted version of the first set, the loss due to the shift (arXiv:2007.00644).
    """
    return {name: rows for name in suite.evaluators if (rows := _compared(suite, name, numbers))}


def _compared(suite: Suite, name: str, numbers: Mapping[str, float]) -> dict[str, dict[str, float]]:
    metrics = suite.evaluators[name].compared
    tasks = [task for task in suite.tasks if task.evaluator == name]
    if len(tasks) < 2 or not metrics:
        return {}
    rows = {task.label: {metric: numbers[f"{task.prefix}{metric}"] for metric in metrics} for task in tasks}
    first, *others = rows.values()
    rows[AVERAGE] = _mean([first, *others])
    if len(others) > 1:
        rows[OTHERS] = _mean(others)
    for row in rows.values():
        row[DROP] = first[metrics[0]] - row[metrics[0]]
    for task in tasks:
        counts = dict.fromkeys(count_of(metric) for metric in metrics)
        rows[task.label] |= {name: numbers[full] for name in counts if (full := f"{task.prefix}{name}") in numbers}
    return rows


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {metric: sum(row[metric] for row in rows) / len(rows) for metric in rows[0]}


def robustness_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns a table of an evaluator's `robustness`, with a row per set."""
    metrics = list(rows[AVERAGE])
    columns = [f"{DROP} in {metrics[0]}" if metric == DROP else metric for metric in metrics]
    shown = [
        (label, *(f"{100 * row[m]:.2f} points" if m == DROP else format_score(m, row) for m in metrics))
        for label, row in rows.items()
    ]
    table = text_table(("set", *columns), shown, title, right=columns)
    table.rows[sum(label not in (AVERAGE, OTHERS) for label in rows) - 1].end_section = True
    return table


def comparison(title: str, found: Sequence[Evaluated]) -> Table:
    """Returns a table with a row per step or model and a column per headline metric."""
    names = list(dict.fromkeys(name for one in found for name in one.numbers if is_headline(name)))
    columns = [name.removeprefix("eval/") for name in names]
    rows = [(one.label, *(format_score(n, one.numbers) if n in one.numbers else "" for n in names)) for one in found]
    return text_table(("model", *columns), rows, title, right=columns)
