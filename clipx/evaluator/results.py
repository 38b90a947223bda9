"""Prints the metrics of evaluated models and writes them as JSON, with a plot if there is something to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.escape import json_text
from clipx.evaluator.plots import plot_models, plot_sets, plot_steps
from clipx.evaluator.suite import Suite
from clipx.evaluator.tables import Evaluated, comparison, robustness, robustness_table
from clipx.report.console import Screen
from clipx.report.figure import attempt
from clipx.storage.local import write_bytes, write_text

Plot = Callable[[], bytes | None]
"""Function that returns a plot as PNG; None if there is nothing to compare."""


def report_results(folder: Path, found: Sequence[Evaluated], suite: Suite, compare: bool, screen: Screen) -> None:
    """Prints the metrics and writes them to `folder`.

    Args:
        found: the evaluated models and steps; a single one unless `compare` is set.
        compare: prints a comparison of models or steps instead of the tables of one model.
    """
    data = "-".join(dict.fromkeys(task.label for task in suite.tasks if task.name is None)) or "sets"
    folder.mkdir(parents=True, exist_ok=True)
    step = "" if compare or found[0].step is None else f"-step-{found[0].step}"
    path = folder / f"evaluation-{data}{step}.json"
    values, draw = _several(found, suite, data, screen) if compare else _single(found[0], suite, data, screen)
    replaced = ", in place of an earlier evaluation" if path.exists() else ""
    write_text(path, json_text(values, indent=1) + "\n")
    path.with_suffix(".png").unlink(missing_ok=True)  # plot of an earlier evaluation
    plot = attempt("the plot", draw)
    if plot is not None:
        write_bytes(path.with_suffix(".png"), plot)
    screen.print(f"written to {path}" + ("" if plot is None else f" and {path.with_suffix('.png').name}") + replaced)


def _single(one: Evaluated, suite: Suite, data: str, screen: Screen) -> tuple[dict[str, Any], Plot]:
    """Prints the metrics of one model. Returns them as JSON values, and a function that plots several sets."""
    screen.table(f"{one.label}, on {data}", one.numbers)
    values = _values(one, suite, data=data)
    tables = values.get("robustness", {})
    for name, rows in tables.items():
        screen.console.print(robustness_table(f"{name}: {one.label}, by set", rows))
    return values, lambda: plot_sets(one.label, tables) if tables else None


def _several(found: Sequence[Evaluated], suite: Suite, data: str, screen: Screen) -> tuple[dict[str, Any], Plot]:
    """Prints a comparison of several models or steps. Returns the metrics as JSON values, and a function that plots."""
    screen.console.print(comparison(f"on {data}", found))
    models = {one.model for one in found}
    values = {"data": data, "models": [_values(one, suite) for one in found]}
    if len(models) < len(found):
        return values, lambda: plot_steps(f"{' and '.join(sorted(models))}, on {data}", found)
    return values, lambda: plot_models(f"{len(found)} models, on {data}", found, suite)


def _values(one: Evaluated, suite: Suite, **more: str) -> dict[str, Any]:
    tables: Mapping[str, Any] = robustness(suite, one.numbers)
    return {"model": one.model, "step": one.step, **more, **one.numbers, **({"robustness": tables} if tables else {})}
