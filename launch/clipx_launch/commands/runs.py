"""Finds the runs of a sweep, and other runs, in folders, and reads their files, which other users may have written."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clipx.checkpoint.records import MANIFEST
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.config.suggestions import did_you_mean
from clipx.errors import ClipxError, ConfigError
from clipx.escape import print_stderr
from clipx.report.run_history import is_event, is_row
from clipx.storage.jsonl import parse_line
from clipx.storage.safe_json import read_regular
from clipx_launch.commands.run import RunFiles, SavedStep
from clipx_launch.commands.state import jobs_of, state_of
from clipx_launch.files import Launch, SweepFile, launch_dir, read_file, read_sweep
from clipx_launch.point import Point, Result

_LARGEST = 1 << 28  # bytes of metrics.jsonl or events.jsonl


def sweep_runs(folder: Path) -> list[RunFiles]:
    """Returns the points of a sweep in the order of their numbers, or the run of a run's directory.

    Raises ClipxError if the folder is neither.
    """
    launched = any((launch_dir(folder) / name).is_file() for name in ("sweep.json", "point.json"))
    if folder.is_dir() and not (launched or (folder / "config.yaml").is_file()):
        raise ConfigError(_no_sweep(folder))
    return runs_in([folder], points_only=launched)


def runs_in(folders: Sequence[Path], points_only: bool = False) -> list[RunFiles]:
    """Returns all runs under some folders, in sweeps or not. Prints a line for each damaged file, once.

    Raises ClipxError if there is none.
    """
    found: dict[Path, RunFiles] = {}
    points_of = cache(_points_of)  # each sweep.json is read once
    for folder in folders:
        for path, listed_in in _run_dirs(folder.resolve(), points_of, points_only).items():
            name = os.path.relpath(path, folder.resolve())
            # Of several folders, each has a run 0.
            name = str(folder) if name == "." else name if len(folders) == 1 else str(folder / name)
            if path not in found:
                found[path] = _read_run(path, name, listed_in, points_of)
    if not found:
        raise ConfigError(f"{', '.join(map(str, folders))} contains no run: give a folder of runs")
    runs = sorted(found.values(), key=_place)
    for run in runs:
        for line in run.damaged:
            note(line)
    now = time.time()
    jobs = jobs_of(runs)
    for _, group in itertools.groupby(runs, lambda run: run.sweep):
        compare_overrides(group)
    for run in runs:
        run.state, run.reason = state_of(run, jobs, now)
    return runs


def _place(run: RunFiles) -> tuple[bool, str, bool, int, str]:
    """Returns the place of a run in a list: those of a sweep together, in the order of their numbers."""
    return run.sweep is None, str(run.sweep), run.point is None, run.point.index if run.point else 0, run.name


@cache  # runs are read again by --watch and --follow
def note(line: str) -> None:
    """Prints what is left out of the output, as a line on stderr."""
    print_stderr(f"note: {line}")


def trained(runs: Iterable[RunFiles]) -> list[RunFiles]:
    """Returns the runs, without the points of other commands. Raises ConfigError if there is none."""
    if not (found := [run for run in runs if run.point is None or run.point.trains]):
        raise ConfigError("all points are of other commands than clipx.train: give a sweep of runs")
    return found


def select_runs(runs: Sequence[RunFiles], names: Sequence[str]) -> list[RunFiles]:
    """Returns the runs with these numbers or folders, all if `names` is empty. Raises ConfigError."""
    known = {run.point.label: run for run in runs if run.point} | {run.name: run for run in runs}
    for name in names:
        if name not in known and Path(name).resolve() not in {run.folder for run in runs}:
            raise ConfigError(
                f"point {name} is not in this sweep: give one of {', '.join(list(known)[:20])}"
                f"{did_you_mean(name, list(known))}"
            )
    by_folder = {run.folder: run for run in runs}
    return [known.get(name) or by_folder[Path(name).resolve()] for name in names] or list(runs)


def compare_overrides(runs: Iterable[RunFiles]) -> None:
    """Sets `varied` of the points among `runs`, by key: the overrides that not all of them have, or of a command that
    follows a run all but `run`."""
    typed = [(run, run.point, dict(map(_pair, run.point.overrides))) for run in runs if run.point is not None]
    own = [values for _, point, values in typed if point.after is None]
    keys = {key: None for values in own for key in values}  # in their order
    differ = [key for key in keys if any(values.get(key) != own[0].get(key) for values in own)]
    for run, point, values in typed:
        shown = differ if point.after is None else [key for key in values if key != "run"]
        run.varied = {key: values[key] for key in shown if key in values}


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


# The launch of each point of a sweep by its run directory. Empty for a folder without a sweep.json that can be read.
_PointsOf = Callable[[Path], Mapping[Path, Launch | None]]


def _run_dirs(folder: Path, points_of: _PointsOf, points_only: bool) -> dict[Path, Path | None]:
    """Returns the run directories in a folder, and those that a sweep in it lists, with that sweep."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist: check the path")
    found: dict[Path, Path | None] = {}
    for at, folders, files in os.walk(folder):
        path = Path(at)
        if ".launch" in folders:
            found |= dict.fromkeys(points_of(path), path)
        if (path / ".launch/point.json").is_file() or ("config.yaml" in files and not points_only):
            found.setdefault(path, None)
        folders[:] = [name for name in folders if name not in (".launch", CHECKPOINTS)]
    return found


def _points_of(sweep: Path) -> dict[Path, Launch | None]:
    """Reads the points that a sweep.json lists. Prints a line if it is damaged, and for each point that is gone."""
    try:
        known = read_sweep(sweep) or SweepFile()
    except ClipxError as error:
        note(str(error))
        return {}
    found: dict[Path, Launch | None] = {}
    for name, number in known.points.items():
        path = sweep / name
        if os.path.isdir(path):  # noqa: PTH112  # never raises
            found[path.resolve()] = known.launches[number] if number < len(known.launches) else None
        else:
            note(f"{path}, a point of the sweep {sweep}, does not exist: it is left out")
    return found


def _sweep_of(
    folder: Path, point: Point | None, listed_in: Path | None, points_of: _PointsOf
) -> tuple[Path | None, Launch | None]:
    """Returns the sweep of a run, and the launch that its sweep.json names.

    The sweep is above the run, which may have been moved with it, or where the point says, or lists the run.
    """
    own = Path(point.sweep) if point is not None and point.sweep else listed_in
    named = [] if own is None else [own]
    for sweep in (folder, *folder.parents, *named):
        if folder in points_of(sweep):
            return sweep, points_of(sweep)[folder]
    # Its sweep.json is gone or damaged, or another user's.
    places = (sweep for sweep in (*named, *folder.parents) if point is not None)
    return next((sweep for sweep in places if os.path.isdir(launch_dir(sweep))), None), None  # noqa: PTH112


def _no_sweep(folder: Path) -> str:
    sweeps = [str(path.parent.parent) for path in folder.glob("*/.launch/sweep.json")]
    sweeps += [str(parent) for parent in folder.absolute().parents if (parent / ".launch/sweep.json").is_file()]
    example = f", such as {sorted(sweeps)[-1]}" if sweeps else ""
    return f"{folder} is no sweep and no run: give the hydra.sweep.dir of a sweep, or a run_dir{example}"


# ------------------------------------------------------------------------------------------- files of a run


def _read_run(folder: Path, name: str, listed_in: Path | None, points_of: _PointsOf) -> RunFiles:
    """Returns the run of a folder. What cannot be read is left out, and a line of `damaged` says so."""
    damaged: list[str] = []
    point = result = None
    try:
        point = Point.read(folder)
    except ClipxError as error:
        damaged.append(str(error))
    sweep, launch = _sweep_of(folder, point, listed_in, points_of)
    if point is not None:
        point.find_job()
        try:
            result = read_file(point.files / "result.json", Result)
        except ClipxError as error:
            damaged.append(str(error))
    elif sweep is not None and not damaged:
        damaged.append(f"{launch_dir(folder) / 'point.json'} does not exist: restore it, or launch the point again")
    rows = _objects(folder / "metrics.jsonl", is_row, damaged)
    events = _objects(folder / "events.jsonl", is_event, damaged)
    checkpoints = _checkpoints(folder)
    return RunFiles(folder, name, point, sweep, launch, rows, events, result, checkpoints, damaged)


def _objects(path: Path, is_sound: Callable[[Any], bool], damaged: list[str]) -> list[dict[str, Any]]:
    """Returns the sound objects of a file of lines. The last line may be incomplete, as of a process that writes it."""
    try:
        lines = read_regular(path, _LARGEST).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        damaged.append(f"{path} cannot be read ({error.strerror}): it is left out")
        return []
    found, wrong = [], []
    for number, line in enumerate(lines, start=1):
        values = parse_line(line)
        if values is not None and is_sound(values) and _is_text(line, values):
            found.append(values)
        elif line.strip() and (values is not None or number < len(lines)):
            wrong.append(number)
    if wrong:
        others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        damaged.append(f"{path}: line {wrong[0]}{others} cannot be read: left out")
    return found


def _is_text(line: bytes, values: dict[str, Any]) -> bool:
    """Returns whether all strings can be written as UTF-8: an escape may stand for half of a pair of surrogates."""
    try:
        return b"\\u" not in line or bool(repr(values).encode())
    except UnicodeEncodeError:
        return False


def _checkpoints(folder: Path) -> list[SavedStep]:
    """Returns the complete checkpoints of a run, the newest first."""
    found = []
    for path in (folder / CHECKPOINTS).glob(f"step-*/{MANIFEST}"):
        try:
            if is_checkpoint(path.parent.name):
                found.append(SavedStep(path.parent, step_of(path.parent), path.parent.stat().st_mtime))
        except OSError:  # being removed
            continue
    return sorted(found, key=lambda one: one.step, reverse=True)
