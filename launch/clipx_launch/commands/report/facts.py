"""Facts of a sweep for its report: commands, versions, dates."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from clipx_launch.commands.run import Run
from clipx_launch.point import launch_dir, read_json

PACKAGES = ("clipx", "torch", "timm", "python")


def commands(folders: Sequence[Path]) -> list[str]:
    """Returns the command lines that launched the sweeps, without repetitions."""
    found: dict[str, None] = {}
    for folder in folders:
        known = read_json(launch_dir(folder) / "sweep.json") or {}
        found |= dict.fromkeys(text for text in known.get("commands", []) if isinstance(text, str))
    return list(found)


def point_command(run: Run) -> str:
    """Returns the command that trains a point by itself."""
    return shlex.join(["python", "-m", "clipx.train", *(run.point.overrides if run.point else [])])


def versions(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the versions that the runs recorded when they started, by package; several if they differ."""
    starts = [event for run in runs for event in run.events if event["event"] == "start"]
    return {
        name: list(dict.fromkeys(event[name] for event in starts if isinstance(event.get(name), str)))
        for name in PACKAGES
    }


def dates(runs: Sequence[Run]) -> tuple[str, str] | None:
    """Returns the dates (UTC) of the first and of the last line of the runs. None without any."""
    marks = [mark for run in runs for mark in (*(e["time"] for e in run.events), *(r["seconds"] for r in run.rows))]
    return (_date(min(marks)), _date(max(marks))) if marks else None


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
