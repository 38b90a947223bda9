"""What several sets, steps or models gave, side by side: as tables on the terminal and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from clipx.evaluator.suite import Suite
from clipx.report.console import format_value, is_headline

DROP = "drop"
AVERAGE, OTHERS = "average", "average of the others"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The numbers of a model, by name. `step`: of the checkpoint, where there is one."""

    model: str
    step: int | None
    numbers: Mapping[str, float]

    @property
    def label(self) -> str:
        return self.model if self.step is None else f"{self.model}, step {self.step}"


def robustness(suite: Suite, numbers: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """{evaluator: {set: {metric: value}}} of each evaluator of several sets, with averages over sets, all alike.

    `drop` is how far the first metric lies below that of the first set: of a set that is a shifted version of the
    first, what the shift costs (arXiv:2007.00644).
    """
    return {name: _compared(suite, name, numbers) for name in suite.evaluators if _compared(suite, name, numbers)}


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
    return {label: {**row, DROP: first[metrics[0]] - row[metrics[0]]} for label, row in rows.items()}


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {metric: sum(row[metric] for row in rows) / len(rows) for metric in rows[0]}


def robustness_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("set")
    metrics = list(next(iter(rows.values())))
    last = [label for label in rows if label not in (AVERAGE, OTHERS)][-1]
    for metric in metrics:
        table.add_column(f"{DROP} in {metrics[0]}" if metric == DROP else metric, justify="right")
    for label, row in rows.items():
        shown = (f"{100 * row[m]:.2f} points" if m == DROP else format_value(m, row[m]) for m in metrics)
        table.add_row(label, *shown, end_section=label == last)
    return table


def comparison(title: str, found: Sequence[Evaluated]) -> Table:
    """A row for each step or model, a column for each headline number."""
    names = list(dict.fromkeys(name for one in found for name in one.numbers if is_headline(name)))
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for name in names:
        table.add_column(name.removeprefix("eval/"), justify="right")
    for one in found:
        table.add_row(one.label, *(format_value(n, one.numbers[n]) if n in one.numbers else "" for n in names))
    return table
