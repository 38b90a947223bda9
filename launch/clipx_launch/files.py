"""JSON files of launchers: `.launch/` in the folders of sweeps and of their points, which other users may have written.

sweep.json    settings of each launch of the sweep, and the folders of its points
search.json   command of a search with Optuna
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from clipx.errors import ClipxError
from clipx.run.lock import Holder
from clipx.storage.local import write_text
from clipx.storage.safe_json import read_as, read_regular

T = TypeVar("T")
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Job = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]  # a word of SLURM's commands, and a part of names of files
Overrides = list[Annotated[str, Field(max_length=1 << 17)]]  # no word of a command line is longer

FIX = "make room, or set hydra.sweep.dir to another folder"
SEARCH = "search.json"
_NEW_S = 60.0  # age of a file below which it may still be written


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a launch, with which `clipx-sweep resume` repeats it. `process`: of clipx_local."""

    settings: dict[str, Any]
    plugins: list[str]
    cwd: str
    process: Holder | None = None


def _by_folder(points: Any) -> Any:
    """Converts the points of a sweep.json that an earlier version wrote: a list of their facts."""
    if isinstance(points, list) and all(isinstance(row, dict) for row in points):
        return {row.get("folder"): row.get("launch") for row in points}
    return points


@dataclass(frozen=True, slots=True)
class SweepFile:
    """Contents of sweep.json. `points`: the number of the latest launch of each run directory, whose path is relative
    to the sweep's folder if it is inside: the sweep may be moved."""

    commands: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    points: Annotated[dict[str, Number], BeforeValidator(_by_folder)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchFile:
    """Contents of search.json: the words of the command after `python -m clipx.train`, and its working directory."""

    words: list[str]
    cwd: str


def launch_dir(folder: Path) -> Path:
    """Returns the launcher's folder in the directory of a run or a sweep."""
    return folder / ".launch"


def read_sweep(folder: Path) -> SweepFile | None:
    """Reads sweep.json of a sweep as `read_file`."""
    return read_file(launch_dir(folder) / "sweep.json", SweepFile)


def read_file(path: Path, kind: type[T]) -> T | None:
    """Returns the values of a JSON file, None if it does not exist. Raises ClipxError if it is damaged.

    Reads a new file again for 1 s, for a shared file system may be replacing it.
    """
    for tries_left in reversed(range(5)):
        try:
            return read_as(kind, read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            if not (tries_left and _is_new(path)):
                reason = error.strerror if isinstance(error, OSError) else str(error)
                denied = isinstance(error, PermissionError)
                fix = "its owner alone can" if denied else "restore it, or delete it and launch again"
                raise ClipxError(f"{path} cannot be read ({reason}): {fix}") from None
            time.sleep(0.2)
    raise AssertionError


def _is_new(path: Path) -> bool:
    try:
        return abs(time.time() - path.stat().st_mtime) < _NEW_S
    except (OSError, ValueError):  # it is gone, or has an impossible name
        return False


def write_json(path: Path, values: Any, private: bool = False) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n", FIX, private)
