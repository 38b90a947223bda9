"""Finds the runs of a sweep, and other runs, in folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clipx.checkpoint.resume import CHECKPOINTS
from clipx.config.messages import did_you_mean
from clipx.errors import ClipxError, ConfigError
from clipx.logger import read_rows
from clipx.storage.jsonl import read_objects
from clipx_launch.commands.run import Run
from clipx_launch.commands.state import jobs_of, state_of
from clipx_launch.point import Point, launch_dir, read_json


def sweep_runs(folder: Path) -> list[Run]:
    """Returns the points of a sweep in the order of their numbers. Raises ClipxError if the folder has none."""
    if not (launch_dir(folder) / "sweep.json").is_file():
        raise ConfigError(_no_sweep(folder))
    return runs_in([folder], points_only=True)


def runs_in(folders: Sequence[Path], points_only: bool = False) -> list[Run]:
    """Returns all runs under some folders, in sweeps or not. Raises ClipxError if there is none or a file is broken."""
    found: dict[Path, Run] = {}
    for folder in folders:
        for path, launch in _run_dirs(folder.resolve(), points_only):
            name = os.path.relpath(path, folder.resolve())
            # Of several folders, each has a run 0.
            name = str(folder) if name == "." else name if len(folders) == 1 else str(folder / name)
            found.setdefault(path, _read(path, name, launch))
    if not found:
        raise ConfigError(f"{', '.join(map(str, folders))} contains no run: give a folder of runs")
    runs = sorted(found.values(), key=lambda run: (run.point is None, run.point.index if run.point else 0, run.name))
    now = time.time()
    jobs = jobs_of(runs)
    for run, typed in zip(runs, varied([run.point.overrides if run.point else [] for run in runs]), strict=True):
        run.varied = typed
        run.state, run.reason = state_of(run, jobs, now)
    return runs


def select_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Run]:
    """Returns the runs with these numbers or folders, all if `names` is empty. Raises ConfigError."""
    known = {str(run.point.index): run for run in runs if run.point} | {run.name: run for run in runs}
    for name in names:
        if name not in known and Path(name).resolve() not in {run.folder for run in runs}:
            raise ConfigError(
                f"point {name} is not in this sweep: give one of {', '.join(list(known)[:20])}"
                f"{did_you_mean(name, list(known))}"
            )
    by_folder = {run.folder: run for run in runs}
    return [known.get(name) or by_folder[Path(name).resolve()] for name in names] or list(runs)


def varied(overrides: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Returns for each run the overrides that not all runs have, by key."""
    pairs = [dict(_pair(text) for text in typed) for typed in overrides]
    keys = {key: None for values in pairs for key in values}  # in their order
    differ = [key for key in keys if any(values.get(key) != pairs[0].get(key) for values in pairs)]
    return [{key: values[key] for key in differ if key in values} for values in pairs]


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def _run_dirs(folder: Path, points_only: bool) -> Iterable[tuple[Path, dict[str, Any] | None]]:
    """Returns the run directories with their launch settings, None if no sweep.json has them."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist: check the path")
    runs: dict[Path, dict[str, Any] | None] = {}
    for at, folders, files in os.walk(folder):
        path = Path(at)
        if ".launch" in folders:
            runs |= _sweep_points(path)
            if (path / ".launch/point.json").is_file():
                runs.setdefault(path, None)
        if "config.yaml" in files and not points_only:
            runs.setdefault(path, None)
        folders[:] = [name for name in folders if name not in (".launch", CHECKPOINTS)]
    return runs.items()


def _sweep_points(folder: Path) -> dict[Path, dict[str, Any] | None]:
    path = launch_dir(folder) / "sweep.json"
    if not path.is_file():
        return {}
    try:
        known = _read_required(path)
        launches = dict(enumerate(known.get("launches", [])))
        # If the sweep was moved, its points are in its present folder.
        paths = [(Path(row["folder"]), launches.get(row.get("launch"))) for row in known["points"]]
        return {(path if path.is_dir() else folder / path.name).resolve(): launch for path, launch in paths}
    except (AttributeError, KeyError, TypeError):
        raise _unreadable(path) from None


def _no_sweep(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} does not exist: check the path"
    sweeps = [str(path.parent.parent) for path in folder.glob("*/.launch/sweep.json")]
    sweeps += [str(parent) for parent in folder.absolute().parents if (parent / ".launch/sweep.json").is_file()]
    example = f", such as {sorted(sweeps)[-1]}" if sweeps else ""
    return f"{folder} contains no sweep (no .launch/sweep.json): give the hydra.sweep.dir of a sweep{example}"


def _read_required(path: Path) -> Any:
    values = read_json(path)
    if values is None:
        raise _unreadable(path)
    return values


def _unreadable(path: Path) -> ClipxError:
    return ClipxError(f"{path} cannot be read: restore it, or delete it and launch again")


def _read(folder: Path, name: str, launch: dict[str, Any] | None) -> Run:
    path = launch_dir(folder) / "point.json"
    point = None
    if path.is_file():
        _read_required(path)
        try:
            point = Point.read(folder)
        except TypeError:
            raise _unreadable(path) from None
    return Run(folder, name, point, launch, read_rows(folder / "metrics.jsonl"), read_objects(folder / "events.jsonl"))
