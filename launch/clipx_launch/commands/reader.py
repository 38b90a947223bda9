"""Reads a folder of a run, perhaps of another user, into `RunFiles`: typed values, and a line for each damaged file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipx.checkpoint.records import MANIFEST
from clipx.checkpoint.resume import CHECKPOINTS, is_checkpoint, step_of
from clipx.errors import ClipxError
from clipx.report.run_history import is_event, is_row
from clipx.storage.jsonl import parse_line
from clipx.storage.safe_json import read_regular
from clipx_launch.commands.run import RunFiles, SavedStep
from clipx_launch.files import Launch, read_file
from clipx_launch.point import Point, Result

_LARGEST = 1 << 28  # bytes of metrics.jsonl or events.jsonl


def read_run(folder: Path, name: str, listed: Point | None, launch: Launch | None) -> RunFiles:
    """Returns the run of a folder. What cannot be read is left out, and a line of `damaged` says so.

    `listed`: the point as the sweep lists it. It takes the place of a point.json that is missing or damaged.
    """
    damaged: list[str] = []
    point, result = listed, None
    try:
        found = Point.read(folder)
        if found is not None and listed is not None and found.index != listed.index:
            raise ClipxError(f"{folder}: point.json has the number {found.index}, and sweep.json {listed.index}")
        point = found or listed
    except ClipxError as error:
        damaged.append(str(error))
    if point is not None:
        try:
            result = read_file(point.launch_dir / "result.json", Result)
        except ClipxError as error:
            damaged.append(str(error))
    rows = _objects(folder / "metrics.jsonl", is_row, damaged)
    events = _objects(folder / "events.jsonl", is_event, damaged)
    return RunFiles(folder, name, point, launch, rows, events, result, _checkpoints(folder), damaged)


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
