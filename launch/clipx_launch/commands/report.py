"""Writes the report of sweeps, or of several runs: a page, and a JSON document with its numbers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clipx.config.safe_yaml import read_saved
from clipx.config.saved import flatten
from clipx.errors import ClipxError, ConfigError, require
from clipx.escape import json_text
from clipx.report.console import is_share
from clipx.report.sweep import SweepReport
from clipx.report.sweep_groups import NOT_GIVEN, RUN, SEED, Metric, SweepRun
from clipx.storage.local import write_text
from clipx_launch.commands.run import RunFiles, State, metric_of
from clipx_launch.commands.runs import compare_overrides, note, runs_in, sweep_runs, trained
from clipx_launch.files import SweepFile, launch_dir, read_sweep

_FIX = "make room, or write it elsewhere by --out"
_WAYS = ("/image_to_text/", "/text_to_image/")  # directions of retrieval: the default metric is their mean
_NOT_COMPARED = re.compile(  # keys of a configuration that do not change what a run learns
    r"(checkpoint|logger|profiler)\b.*|evaluator\.\w+\.every|data\.(workers|prefetch)|"
    r"(\w+\.)*name|run_dir|resume|report|log_every|device_peak_tflops"
)


def write(
    folders: Sequence[Path], metric: str | None, lowest: bool, by: str | None, x: str | None, baseline: str | None,
    out: Path | None,
) -> None:  # fmt: skip
    """Writes a page that compares the points of sweeps, or several runs, and its numbers as JSON. Raises ClipxError."""
    sweeps = [folder for folder in folders if (launch_dir(folder) / "sweep.json").is_file()]
    single = [folder for folder in folders if folder not in sweeps and (folder / "config.yaml").is_file()]
    others = [folder for folder in folders if folder not in single]
    page = out or folders[0] / ("report.html" if others else "comparison.html")  # a run has a report.html of its own
    require(page.suffix == ".html", f"--out={page} must end in .html: the numbers have the same name with .json")
    require(page.parent.is_dir(), f"--out={page}: {page.parent} is not a folder: create it, or choose another")
    different = {folder.resolve() for folder in folders}
    require(len(different) == len(folders), f"a folder is given twice: {', '.join(map(str, folders))}: remove one")
    if single and others:
        raise ConfigError(f"{single[0]} is a run, {others[0]} is not: give two or more runs, or sweeps alone")
    runs = _points(folders) if others else _runs(folders)
    plain = [_plain(run) for run in runs]
    commands = [text for folder in folders for text in _commands(folder)] if others else [run.command for run in plain]
    commands = list(dict.fromkeys(filter(None, commands)))
    title = ", ".join(folder.absolute().name for folder in folders)
    report = SweepReport(title, commands, plain, _metric(runs, metric, lowest), by, x, baseline)
    html, numbers = report.page(), json_text(report.document(), indent=1) + "\n"
    write_text(page, html, _FIX)
    write_text(page.with_suffix(".json"), numbers, _FIX)
    print(report.counted)
    print(f"written to {page.parent}: {page.name}, {page.with_suffix('.json').name}")


def _commands(sweep: Path) -> list[str]:
    """Returns the commands that launched a sweep. Empty if its sweep.json is damaged, of which `sweep_runs` tells."""
    with suppress(ClipxError):
        return (read_sweep(sweep) or SweepFile()).commands
    return []


def _points(folders: Sequence[Path]) -> list[RunFiles]:
    """Returns the points of all sweeps, in the order of the folders. Several folders name their points."""
    if len(folders) == 1:
        return trained(sweep_runs(folders[0]))
    found: dict[Path, RunFiles] = {}
    for folder, name in _names(folders).items():
        for run in trained(sweep_runs(folder)):
            run.name = f"{name}/{run.name}"
            found.setdefault(run.folder, run)
    compare_overrides(found.values())
    return list(found.values())


def _runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Returns runs outside a sweep. The keys of their configurations that differ take the place of overrides."""
    own = folders[0] / "report.html"
    require(len(folders) > 1, f"{folders[0]} is one run, whose report is {own}: give two or more runs, or a sweep")
    read = {folder: config for folder in folders if (config := _config(folder)) is not None}
    require(len(read) > 1, "fewer than two runs have a config.yaml that can be read: restore it, or give other runs")
    names, configs = _names(folders), list(read.values())
    keys = [key for key in configs[0] if all(key in config for config in configs)]  # not those of another `kind`
    keys = [key for key in keys if len({config[key] for config in configs}) > 1]
    runs = []
    for folder, config in read.items():
        run = next(run for run in runs_in([folder]) if run.folder == folder.resolve())
        run.name, run.varied = names[folder], {key: config[key] for key in keys}
        runs.append(run)
    groups = [tuple(config[key] for key in keys if key != SEED) for config in configs]
    seeds = {(*group, config.get(SEED)) for group, config in zip(groups, configs, strict=True)}
    if len(set(groups)) == len(runs) or len(seeds) < len(runs):  # no groups of seeds: each run is a contender
        for run in runs:
            run.varied = {RUN: run.name, **run.varied}
    return runs


def _config(folder: Path) -> dict[str, str] | None:
    """Returns the compared keys of a run's configuration and their values as they are typed: `optimizer.lr`, `0.001`.

    Prints a line, and returns None, for a damaged configuration.
    """
    try:
        values = flatten(read_saved(folder / "config.yaml"))
    except ConfigError as error:
        note(f"{error}: {folder} is left out")
        return None
    found = {key.removesuffix(".kind"): value for key, value in values}
    typed = {key: value if isinstance(value, str) else json_text(value) for key, value in found.items()}
    return {key: value for key, value in typed.items() if not _NOT_COMPARED.fullmatch(key)}


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns the names of folders, or their paths where these are the same."""
    names = [folder.absolute().name for folder in folders]
    return {f: name if names.count(name) == 1 else str(f) for f, name in zip(folders, names, strict=True)}


def _plain(run: RunFiles) -> SweepRun:
    """Returns what the report reads of a run."""
    typed = run.point.overrides if run.point else []
    seeds = [NOT_GIVEN, *(text.partition("=")[2] for text in typed if text.lstrip("+").startswith(f"{SEED}="))]
    started = ["", *(str(event["command"]) for event in run.events if "command" in event)]
    of = f" of {run.steps:,}" if run.state is not State.finished and run.steps else ""  # steps: slow to read
    step = f" at step {run.last['step']:,.0f}{of}" if run.last else ""
    reason = f": {run.reason}" if run.state is State.failed and run.reason else ""  # those of other states name hosts
    return SweepRun(
        name=run.name,
        overrides=run.varied,
        seed=run.varied.get(SEED, seeds[-1]),
        state=run.state.value,
        progress=f"{run.state.value}{step}{reason}",
        command=shlex.join(["python", "-m", "clipx.train", *typed]) if run.point else started[-1],
        rows=run.rows,
        events=run.events,
        values={name: number.value for name, number in run.newest.items()},
        step=int(run.last["step"]) if run.last else None,
        seconds=run.seconds,
        samples_per_second=run.samples_per_second,
    )


def _metric(runs: Sequence[RunFiles], asked: str | None, lowest: bool) -> Metric:
    """Returns the metric that `asked` names, several names separated by commas. Raises ConfigError.

    The default is the first headline metric; for a direction of retrieval the mean of both directions.
    """
    names = tuple(dict.fromkeys(metric_of(runs, name) for name in (asked.split(",") if asked else [None])))
    if asked is None:
        logged = {name for run in runs for name in run.newest}
        both = [names[0].replace(way, other) for way in _WAYS for other in _WAYS if way in names[0]]
        names = tuple(name for name in both if name in logged) or names
    kinds = {(name.endswith("loss"), is_share(name)) for name in names}
    mixed = f"--metric={asked} mixes losses, shares or other numbers, which have no mean: give one kind"
    require(len(kinds) == 1, mixed)
    return Metric(names, lowest or names[0].endswith("loss"))
