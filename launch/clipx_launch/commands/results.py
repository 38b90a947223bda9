"""Results of a sweep: its best point by a metric, and results.csv and results.parquet with a row for each point."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.errors import ConfigError
from clipx.report.console import format_clock, is_headline, stdout_console, text_table
from clipx.storage.local import write_atomically
from clipx_launch.commands.run import MetricValue, RunFiles, metric_of, value_of
from clipx_launch.commands.runs import sweep_runs

if TYPE_CHECKING:
    from rich.table import Table

Cell = str | int | float | None
_FIX = "make room, or copy the sweep to a folder you can write"


def lower_is_better(metric: str, asked: bool) -> bool:
    """Returns True for `--lowest` and for losses."""
    return asked or metric.endswith("loss")


def print_best(folder: Path, metric: str | None, lowest: bool, as_json: bool) -> None:
    """Prints the point whose last value of the metric is the best. Raises ConfigError if no point has a value."""
    runs = sweep_runs(folder)
    metric = metric_of(runs, metric)
    valued = [(number, run) for run in runs if (number := value_of(run, metric))]
    if not valued:
        raise ConfigError(f"metric={metric} has no value yet in {folder}: wait until a point has logged one")
    sign = -1 if lower_is_better(metric, lowest) else 1
    number, run = max(valued, key=lambda found: sign * found[0].value)
    found = {
        "metric": metric,
        "value": number.value,
        "step": number.step,
        "point": run.point.index if run.point else None,
        "state": run.state,
        "overrides": run.varied,
        "run": str(run.folder),
        "checkpoint": _checkpoint(run, number),
        "points": len(runs),
        "points_with_value": len(valued),
    }
    print(json.dumps(found, indent=1) if as_json else _summary(found, run, number))


def _checkpoint(run: RunFiles, number: MetricValue) -> str | None:
    """Returns the checkpoint of the value's step, else the newest, else None."""
    of_step = [one for one in run.checkpoints if one.step == number.step]
    return next((str(one.folder) for one in of_step + run.checkpoints), None)


def _summary(found: dict[str, object], run: RunFiles, number: MetricValue) -> str:
    metric = str(found["metric"])
    typed = " ".join(f"{key}={value}" for key, value in run.varied.items())
    lines = {
        metric: f"{run.score(metric, number)} at step {number.step:,}",
        "point": f"{run.name}, {run.state}; of {found['points']} points {found['points_with_value']} have a value",
        "overrides": typed or "(the same for all points)",
        "run": shlex.quote(str(run.folder)),
        "checkpoint": shlex.quote(str(found["checkpoint"])) if found["checkpoint"] else "(none)",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())


def write(folder: Path, metric: str | None) -> None:
    """Writes the files and prints a summary table. Raises ClipxError."""
    runs = sweep_runs(folder)
    metric = metric_of(runs, metric)
    rows = rows_of(runs)
    write_atomically(folder / "results.csv", lambda path: _csv(Path(path), rows), _FIX)
    write_atomically(folder / "results.parquet", lambda path: _parquet(path, rows), _FIX)
    stdout_console().print(_summary_table(runs, metric))
    print(f"written to {folder}: results.csv, results.parquet")


def rows_of(runs: Sequence[RunFiles]) -> list[dict[str, Cell]]:
    """Returns a row for each run: varied overrides, state, last value of each metric, best value of headline
    metrics."""
    typed = _columns([run.varied for run in runs])
    numbers = list({name: None for run in runs for name in run.newest if name.startswith("eval/")})
    rows = []
    for run, values in zip(runs, typed, strict=True):
        row: dict[str, Cell] = {"point": run.point.index if run.point else None, "run": run.name, **values}
        row |= {"state": str(run.state), "reason": run.reason or None}
        row |= {"step": int(run.last["step"]) if run.last else None, "steps": run.steps}
        row |= {"train/loss": run.last.get("train/loss")}
        row |= {name: run.newest[name].value if name in run.newest else None for name in numbers}
        for name in filter(is_headline, numbers):
            row[f"best/{name}"] = run.best[name].value if name in run.best else None
        rows.append(row | {"samples_per_second": run.samples_per_second, "seconds": run.seconds})
    return rows


def _columns(typed: Sequence[dict[str, str]]) -> list[dict[str, Cell]]:
    """Returns the overrides as cells. A column holds numbers if all of its texts are numbers."""
    keys = list({key: None for values in typed for key in values})
    columns = {key: _parsed([values.get(key) for values in typed]) for key in keys}
    return [{key: columns[key][i] for key in keys} for i in range(len(typed))]


def _parsed(texts: Sequence[str | None]) -> list[Cell]:
    """Parses all texts as integers, else all as floats, else returns the texts. None remains None."""
    for kind in (int, float):
        try:
            return [None if text is None else kind(text) for text in texts]
        except ValueError:
            continue
    return list(texts)


def _csv(path: Path, rows: Sequence[dict[str, Cell]]) -> None:
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _parquet(path: str, rows: Sequence[dict[str, Cell]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def _summary_table(runs: Sequence[RunFiles], metric: str) -> Table:
    keys = list({key: None for run in runs for key in run.varied})
    right = (metric.removeprefix("eval/"), "at step", "samples/s", "time")
    rows = []
    for run in runs:
        number, rate = value_of(run, metric), run.samples_per_second
        rows.append(
            (
                run.name,
                *(run.varied.get(key, "") for key in keys),
                run.state,
                *(("", "") if number is None else (run.score(metric, number), f"{number.step:,}")),
                "" if rate is None else f"{rate:,.0f}",
                format_clock(run.seconds),
            )
        )
    return text_table(("run", *keys, "state", *right), rows, right=right)
