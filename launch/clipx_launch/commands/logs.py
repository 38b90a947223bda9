"""Prints the logs of the ranks of points."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from clipx.errors import require
from clipx.storage.local import open_own
from clipx_launch.commands.run import ENDED, RunFiles, State
from clipx_launch.commands.runs import select_runs, sweep_runs
from clipx_launch.commands.state import time_of
from clipx_launch.files import launch_dir

_POLL_S = 1.0
_TAIL = 1 << 24  # last bytes of a log among which its last lines are searched


def show(sweep: Path, points: Sequence[str], rank: int | None, lines: int, follow: bool) -> None:
    """Prints the last lines of the logs of the named points, by default of all failed ones. Raises ClipxError.

    With `follow` prints new lines, also of new files, until all points have ended.
    """
    require(lines >= 0, f"--lines={lines} must be 0 (all) or more")
    runs = sweep_runs(sweep)
    chosen = select_runs(runs, points) if points else [run for run in runs if run.state is State.failed]
    if not chosen:
        _list(runs)
        return
    names, shown, last = [run.name for run in chosen], dict[Path, int](), None
    while True:
        over = not follow or all(run.state in ENDED for run in chosen)  # before the logs are read to their last lines
        for run in chosen:
            paths = _logs_of(run, rank)
            if not paths and not follow:
                why = "has no log yet" if run.point else "has no log: it was started without a launcher"
                print(f"{run.name} is {run.state}{f' ({run.reason})' if run.reason else ''} and {why}")
            for path in paths:
                new = path not in shown
                text, shown[path] = _read(path, shown.get(path), lines)
                if new or text:
                    print(("" if path == last else f"==> {path} <==\n") + text, end="", flush=True)
                    last = path
        if over:
            return
        time.sleep(_POLL_S)
        chosen, lines = select_runs(sweep_runs(sweep), names), 0


def _logs_of(run: RunFiles, rank: int | None) -> list[Path]:
    """Returns the logs of the point's last start: of each rank or of one, and SLURM's log.

    Raises ConfigError if there are logs, but none of that rank.
    """
    logs = launch_dir(run.folder) / "logs"
    found = list(logs.glob(f"{run.job or 'local'}.*.log")) or list(logs.glob("*.*.log"))
    ranks = {_rank(path): path for path in sorted(found, key=lambda path: (time_of(path), path.name))}
    if rank is not None and ranks:
        known = ", ".join(map(str, sorted(ranks)))
        require(rank in ranks, f"--rank={rank} has no log at point {run.name}: give one of {known}")
        return [ranks[rank]]
    batch = launch_dir(run.sweep or run.folder) / "logs" / f"{run.job}.log"
    batch_logs = [batch] if rank is None and run.job and batch.is_file() and batch.stat().st_size else []
    return [ranks[number] for number in sorted(ranks)] + batch_logs


def _rank(path: Path) -> int:
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() and len(number) < 10 else -1


def _list(runs: Sequence[RunFiles]) -> None:
    print("no point has failed; name one of the points with logs:")
    for run in runs:
        if logs := _logs_of(run, None):
            print(f"  {run.name}  {run.state}  {len(logs)} in {logs[0].parent}")


def _read(path: Path, start: int | None, lines: int) -> tuple[str, int]:
    """Returns the text of a log from an offset in bytes on, and the offset after it.

    Of a log that is read first, with start=None, this is its last lines, or all for lines=0.
    """
    try:
        with open_own(path, "rb") as file:
            tail = os.fstat(file.fileno()).st_size - _TAIL if lines else 0
            file.seek(max(0, tail) if start is None else start)
            text = b"".join(deque(file, maxlen=lines or None)).decode("utf-8", errors="replace")
            return text + ("\n" if start is None and text and not text.endswith("\n") else ""), file.tell()
    except OSError as error:
        return f"(cannot be read: {error.strerror})\n" if start is None else "", start or 0
