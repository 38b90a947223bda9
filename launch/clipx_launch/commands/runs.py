"""Finds the runs of a sweep, and other runs, in folders, and reads their files, which other users may have written."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
from clipx_launch.files import Launch, ListedPoint, launch_dir, read_file, read_item, read_sweep
from clipx_launch.point import Point, Result

_LARGEST = 1 << 28  # bytes of metrics.jsonl or events.jsonl


def sweep_runs(folder: Path) -> list[RunFiles]:
    """Returns the points of a sweep in the order of their numbers, or the run of a run's directory.

    Raises ClipxError if the folder is neither.
    """
    if _has_sweep(folder) or (launch_dir(folder) / "point.json").is_file():
        return runs_in([folder], points_only=True)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(_no_sweep(folder))
    return runs_in([folder])


def runs_in(folders: Sequence[Path], points_only: bool = False) -> list[RunFiles]:
    """Returns all runs under some folders, in sweeps or not. Prints a line for each damaged file, once.

    Raises ClipxError if there is none.
    """
    found: dict[Path, RunFiles] = {}
    for folder in folders:
        for path, listed in _run_dirs(folder.resolve(), points_only).items():
            name = os.path.relpath(path, folder.resolve())
            # Of several folders, each has a run 0.
            name = str(folder) if name == "." else name if len(folders) == 1 else str(folder / name)
            found.setdefault(path, read_run(path, name, listed))
    if not found:
        raise ConfigError(f"{', '.join(map(str, folders))} contains no run: give a folder of runs")
    runs = sorted(found.values(), key=_place)
    for run in runs:
        for line in run.damaged:
            note(line)
    now = time.time()
    jobs = jobs_of(runs)
    for _, group in itertools.groupby(runs, lambda run: run.sweep):
        points = list(group)
        overrides = varied([run.point.overrides if run.point else [] for run in points])
        for run, typed in zip(points, overrides, strict=True):
            run.varied = typed
            run.state, run.reason = state_of(run, jobs, now)
    return runs


def _place(run: RunFiles) -> tuple[bool, str, int, str]:
    """Returns the place of a run in a list: after the others of its sweep, in the order of their numbers."""
    return run.point is None, str(run.sweep or ""), run.point.index if run.point else 0, run.name


@cache  # runs are read again by --watch and --follow
def note(line: str) -> None:
    """Prints what is left out of the output, as a line on stderr."""
    print_stderr(f"note: {line}")


def select_runs(runs: Sequence[RunFiles], names: Sequence[str]) -> list[RunFiles]:
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


class _Listed(NamedTuple):
    """Facts of a run in a sweep.json."""

    point: Point | None = None
    launch: Launch | None = None
    sweep: Path | None = None


def _run_dirs(folder: Path, points_only: bool) -> dict[Path, _Listed]:
    """Returns the run directories, with what a sweep.json says of them."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist: check the path")
    runs: dict[Path, _Listed] = {}
    for at, folders, files in os.walk(folder):
        path = Path(at)
        if ".launch" in folders:
            runs |= _sweep_points(path)
            if (path / ".launch/point.json").is_file() and path not in runs:
                runs[path] = _listed_elsewhere(path)
        if "config.yaml" in files and not points_only:
            runs.setdefault(path, _Listed())
        folders[:] = [name for name in folders if name not in (".launch", CHECKPOINTS)]
    return runs


def _listed_elsewhere(path: Path) -> _Listed:
    """Returns what the sweep of a point says, which is in another folder or was moved with it."""
    own = list[Path]()
    with suppress(ClipxError):  # `read_run` tells
        own += [Path(point.sweep)] if (point := Point.read(path)) is not None and point.sweep else []
    places = [*path.parents, *own]
    found = (points[path] for points in map(_sweep_points, filter(_has_sweep, places)) if path in points)
    damaged = [folder for folder in places if os.path.lexists(launch_dir(folder) / "sweep.json")]
    missing = [folder for folder in own if os.path.isdir(folder)]  # noqa: PTH112  # never raises
    return next(found, _Listed(sweep=next(iter(damaged + missing), None)))


def _has_sweep(folder: Path) -> bool:
    try:
        return (launch_dir(folder) / "sweep.json").is_file()
    except (OSError, ValueError):  # an impossible name
        return False


def _sweep_points(folder: Path) -> dict[Path, _Listed]:
    """Returns the points of a sweep; of a damaged sweep.json those that can be read."""
    try:
        known = read_sweep(folder)
    except ClipxError as error:
        note(str(error))
        return {}
    found: dict[Path, _Listed] = {}
    for number, values in enumerate(known.points if known else ()):
        row = read_item(ListedPoint, values)
        at = None if row is None else _present(folder, row.folder)
        if known is None or row is None or at is None:
            note(f"{launch_dir(folder) / 'sweep.json'}: point {number} cannot be read: left out")
            continue
        point = Point(folder=at, index=row.index, overrides=row.overrides, content="", job=row.job, task=row.task)
        launches = known.launches[row.launch : row.launch + 1] if row.launch is not None else []
        found[at] = _Listed(point, read_item(Launch, launches[0]) if launches else None, folder)
    return found


def _present(sweep: Path, folder: str) -> Path | None:
    """Returns the folder of a point: in the present folder of a sweep that was moved. None for an impossible name."""
    try:
        path = Path(folder)
        return (path if path.is_dir() else sweep / path.name).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, with NUL, a loop of links
        return None


def _no_sweep(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} does not exist: check the path"
    sweeps = [str(path.parent.parent) for path in folder.glob("*/.launch/sweep.json")]
    sweeps += [str(parent) for parent in folder.absolute().parents if (parent / ".launch/sweep.json").is_file()]
    example = f", such as {sorted(sweeps)[-1]}" if sweeps else ""
    return f"{folder} is no sweep and no run: give the hydra.sweep.dir of a sweep, or a run_dir{example}"


# ------------------------------------------------------------------------------------------- files of a run


def read_run(folder: Path, name: str, listed: _Listed) -> RunFiles:
    """Returns the run of a folder. What cannot be read is left out, and a line of `damaged` says so.

    The point that the sweep lists takes the place of a point.json that is missing or damaged.
    """
    damaged: list[str] = []
    point, result = listed.point, None
    try:
        found = Point.read(folder)
        if found is not None and point is not None and found.index != point.index:
            raise ClipxError(f"{folder}: point.json has the number {found.index}, and sweep.json {point.index}")
        point = found or point
    except ClipxError as error:
        damaged.append(str(error))
    if point is not None:
        point.find_job()
        try:
            result = read_file(point.files / "result.json", Result)
        except ClipxError as error:
            damaged.append(str(error))
    rows = _objects(folder / "metrics.jsonl", is_row, damaged)
    events = _objects(folder / "events.jsonl", is_event, damaged)
    checkpoints = _checkpoints(folder)
    return RunFiles(folder, name, point, listed.sweep, listed.launch, rows, events, result, checkpoints, damaged)


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
