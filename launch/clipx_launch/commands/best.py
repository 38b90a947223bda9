"""Prints the best point of a sweep by a metric."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from clipx.errors import ConfigError
from clipx_launch.commands.run import MetricValue, RunFiles, metric_of, value_of
from clipx_launch.commands.runs import sweep_runs


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
