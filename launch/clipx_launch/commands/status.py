"""Prints the state of each run under some folders, or the best point of a sweep, as text or as JSON."""

from __future__ import annotations

import itertools
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.live import Live

from clipx.errors import ConfigError, require, require_effect
from clipx.report.console import format_clock, format_value, stdout_console, text_table
from clipx_launch.commands.run import ENDED, RunFiles, State, metric_of, value_of
from clipx_launch.commands.runs import runs_in, sweep_runs, trained

if TYPE_CHECKING:
    from rich.table import Table

_POLL_S = 3.0  # limits the queries to SLURM
_LIVE = {  # metric and format of each column of --live
    "MFU": ("train/mfu", "{:.1%}"),
    "device": ("train/device_utilization", "{:.0%}"),
    "data wait": ("train/data_wait_share", "{:.0%}"),
    "memory": ("train/device_memory_gb", "{:.1f} GB"),
}
_NUMBERS = ("step", "loss", "samples/s", *_LIVE)


def show(
    folders: Sequence[Path], watch: bool, live: bool, best: bool, metric: str | None, lowest: bool, as_json: bool
) -> None:
    """Prints a table of all runs under some folders, or the best point of a sweep. Raises ClipxError."""
    require_effect(best or metric is None, f"--metric={metric}", "without --best", "add --best")
    require_effect(best or not lowest, "--lowest", "without --best", "add --best")
    for given, name in ((watch, "--watch"), (live, "--live")):
        require_effect(not given or not (best or as_json), name, "with --best or --json")
    if best:
        several = f"--best takes one sweep, not {len(folders)}: give one of {', '.join(map(str, folders))}"
        require(len(folders) == 1, several)
        _print_best(folders[0], metric, lowest, as_json)
        return
    runs = runs_in(folders)
    if as_json:
        print(json.dumps({"time": time.time(), "runs": [_facts(run) for run in runs]}, indent=1))
    elif watch:
        _watch(folders, runs, live)
    else:
        stdout_console().print(table(runs, live=live))


def _watch(folders: Sequence[Path], runs: list[RunFiles], live: bool) -> None:
    """Refreshes the table on a terminal. Elsewhere the table is printed when all runs have ended."""
    console = stdout_console()
    with Live(table(runs, live=live), console=console, auto_refresh=False) as shown:
        while any(run.state not in ENDED for run in runs):
            time.sleep(_POLL_S)
            runs = runs_in(folders)
            shown.update(table(runs, live=live), refresh=True)
    if not console.is_terminal:
        console.line()  # rich ends the last line on a terminal alone


def _facts(run: RunFiles) -> dict[str, Any]:
    """Returns a run for JSON. All runs have the same keys; null means no value yet."""
    newest = run.checkpoints[:1]
    return {
        "run": run.name,
        "folder": str(run.folder),
        "sweep": str(run.sweep) if run.sweep else None,
        "index": run.point.index if run.point else None,
        "command": run.point.command if run.point else None,
        "job": run.job,
        "requeues": run.point.requeues if run.point else None,
        "state": run.state,
        "reason": run.reason or None,
        "overrides": run.point.overrides if run.point else None,
        "step": run.last.get("step"),
        "steps": run.steps,
        "loss": run.last.get("train/loss"),
        "metrics": {name: number._asdict() for name, number in run.newest.items() if name.startswith("eval/")},
        "best": {name: number._asdict() for name, number in run.best.items()},
        "samples_per_second": run.samples_per_second,
        "live": _live(run) or None,
        "seconds": run.seconds,
        "last_line": run.rows[-1]["seconds"] if run.rows else None,
        "checkpoint": {"step": newest[0].step, "time": newest[0].time} if newest else None,
        "damaged": run.damaged,
    }


def _live(run: RunFiles) -> dict[str, float]:
    """Returns the newest value of each metric of --live. Empty for a run that does not train now."""
    training = run.state in (State.running, State.silent)
    return {name: run.newest[name].value for name, _ in _LIVE.values() if training and name in run.newest}


def table(runs: Sequence[RunFiles], metric: str | None = None, live: bool = False) -> Table:
    """Returns the table with a row for each run, without empty columns. `metric`: see `metric_of`."""
    now, metric = time.time(), metric_of(runs, metric)
    rows = [_row(run, metric, now, live) for run in runs]
    columns = [name for name in rows[0] if name == "state" or any(row[name] for row in rows)]
    cells = [[row[name] for name in columns] for row in rows]
    last = [n for n, (run, after) in enumerate(itertools.pairwise(runs)) if run.sweep != after.sweep]  # of its sweep
    return text_table(columns, cells, right=_NUMBERS, sections=last)


def _row(run: RunFiles, metric: str, now: float, live: bool) -> dict[str, str]:
    step = f"{run.last['step']:,.0f}" if run.last else ""
    newest, lately = run.checkpoints[:1], _live(run) if live else {}
    return {
        "run": run.name,
        "overrides": _typed(run),
        "job": (run.job or "") + (f", requeued {run.point.requeues}x" if run.point and run.point.requeues else ""),
        "state": run.state,
        "step": step + (f" / {run.steps:,}" if step and run.steps else ""),
        "loss": f"{run.last['train/loss']:.4f}" if run.last else "",
        **({metric.removeprefix("eval/"): _metric(run, metric)} if metric != "train/loss" else {}),
        "samples/s": "" if run.samples_per_second is None else f"{run.samples_per_second:,.0f}",
        **{column: text.format(lately[name]) if name in lately else "" for column, (name, text) in _LIVE.items()},
        "checkpoint": f"step {newest[0].step:,}, {_age(now - newest[0].time)}" if newest else "",
        "last line": _age(now - run.rows[-1]["seconds"]) if run.rows and run.state not in ENDED else "",
        "reason": run.reason,
    }


def _typed(run: RunFiles) -> str:
    return " ".join(f"{key}={value}" for key, value in run.varied.items())


def _metric(run: RunFiles, metric: str) -> str:
    """Formats the newest value of a metric, and the highest if it is another."""
    number, best = value_of(run, metric), run.best.get(metric)
    if number is None:
        return ""
    higher = "" if best is None or best.value <= number.value else f" (best {format_value(metric, best.value)})"
    return run.score(metric) + higher


def _age(seconds: float) -> str:
    return f"{format_clock(seconds)} ago"


def _print_best(sweep: Path, metric: str | None, lowest: bool, as_json: bool) -> None:
    """Prints the point whose last value of the metric is the best. Raises ConfigError if no point has a value."""
    runs = trained(sweep_runs(sweep))
    metric = metric_of(runs, metric)
    valued = [(run, number) for run in runs if (number := value_of(run, metric))]
    if not valued:
        raise ConfigError(f"metric={metric} has no value yet in {sweep}: wait until a point has logged one")
    sign = -1 if lowest or metric.endswith("loss") else 1
    run, number = max(valued, key=lambda found: sign * found[1].value)
    of_step = [one for one in run.checkpoints if one.step == number.step]
    checkpoint = next((str(one.folder) for one in of_step + run.checkpoints), None)  # of the value's step, else newest
    if as_json:
        found = {
            "metric": metric,
            **number._asdict(),
            "point": run.point.index if run.point else None,
            "state": run.state,
            "overrides": run.varied,
            "run": str(run.folder),
            "checkpoint": checkpoint,
            "points": len(runs),
            "points_with_value": len(valued),
        }
        print(json.dumps(found, indent=1))
        return
    lines = {
        metric: f"{run.score(metric)} at step {number.step:,}",
        "point": f"{run.name}, {run.state}; of {len(runs)} points {len(valued)} have a value",
        "overrides": _typed(run) or "(the same for all points)",
        "run": shlex.quote(str(run.folder)),
        "checkpoint": shlex.quote(checkpoint) if checkpoint else "(none)",
    }
    width = max(map(len, lines))
    print("\n".join(f"{name:{width}}  {text}" for name, text in lines.items()))
