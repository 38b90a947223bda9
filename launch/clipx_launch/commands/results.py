"""Results of a sweep: results.csv and results.parquet with a row for each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.report.console import is_headline, stdout_console
from clipx.storage.local import write_atomically
from clipx_launch.commands.run import MetricValue, RunFiles
from clipx_launch.commands.runs import sweep_runs, trained
from clipx_launch.commands.status import table

if TYPE_CHECKING:
    import pyarrow

_FIX = "make room, or copy the sweep to a folder you can write"


def write(sweep: Path, metric: str | None) -> None:
    """Writes results.csv and results.parquet with a row per point, and prints a table. Raises ClipxError."""
    import pyarrow.csv
    import pyarrow.parquet

    runs = trained(sweep_runs(sweep))
    shown = table(runs, metric)
    rows = _rows(runs)
    write_atomically(sweep / "results.csv", lambda path: pyarrow.csv.write_csv(rows, path), _FIX)
    write_atomically(sweep / "results.parquet", lambda path: pyarrow.parquet.write_table(rows, path), _FIX)
    stdout_console().print(shown)
    print(f"written to {sweep}: results.csv, results.parquet")


def _rows(runs: Sequence[RunFiles]) -> pyarrow.Table:
    """Returns a row for each run: varied overrides, state, last value of each metric, best value of headline
    metrics."""
    import pyarrow

    keys = dict.fromkeys(key for run in runs for key in run.varied)
    metrics = dict.fromkeys(name for run in runs for name in run.newest if name.startswith("eval/"))
    return pyarrow.table(
        {
            "point": [run.point.index if run.point else None for run in runs],
            "run": [run.name for run in runs],
            **{key: _typed([run.varied.get(key) for run in runs]) for key in keys},
            "state": [run.state.value for run in runs],
            "reason": [run.reason or None for run in runs],
            "step": [int(run.last["step"]) if run.last else None for run in runs],
            "steps": [run.steps for run in runs],
            "train/loss": [run.last.get("train/loss") for run in runs],
            **{name: [_value(run.newest, name) for run in runs] for name in metrics},
            **{f"best/{name}": [_value(run.best, name) for run in runs] for name in filter(is_headline, metrics)},
            "samples_per_second": [run.samples_per_second for run in runs],
            "seconds": [run.seconds for run in runs],
        }
    )


def _value(values: Mapping[str, MetricValue], name: str) -> float | None:
    return values[name].value if name in values else None


def _typed(texts: Sequence[str | None]) -> pyarrow.Array:
    """Returns the values of an override: as integers if all are, else as floats if all are numbers, else as text."""
    import pyarrow

    column = pyarrow.array(texts, pyarrow.string())
    for kind in (pyarrow.int64(), pyarrow.float64()):
        with suppress(pyarrow.ArrowInvalid):
            return column.cast(kind)
    return column
