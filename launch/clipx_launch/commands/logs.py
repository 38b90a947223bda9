"""Prints the logs of the ranks of points."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from clipx.errors import ConfigError
from clipx.storage.local import open_own
from clipx_launch.commands.run import ENDED, RunFiles, State
from clipx_launch.commands.runs import select_runs, sweep_runs
from clipx_launch.commands.state import time_of
from clipx_launch.files import launch_dir

_POLL_S = 1.0
_TAIL = 1 << 24  # last bytes of a log among which its last lines are searched


def show(folder: Path, names: Sequence[str], rank: int | None, lines: int, follow: bool) -> None:
    """Prints the last lines of each log of the named points, by default of the failed ones. Raises ClipxError."""
    runs = sweep_runs(folder)
    chosen = select_runs(runs, names) if names else [run for run in runs if run.state is State.failed]
    if not chosen:
        _list(runs)
        return
    shown: dict[Path, int] = {}
    for run in chosen:
        paths = logs_of(run, rank)
        if not paths and not follow:
            why = "has no log yet" if run.point else "has no log: it was started without a launcher"
            print(f"{run.name} is {run.state}{f' ({run.reason})' if run.reason else ''} and {why}")
        for path in paths:
            text, shown[path] = _tail(path, lines)
            print(f"==> {path} <==\n{text}", end="", flush=True)
    if follow:
        _follow(folder, [run.name for run in chosen], rank, shown)


def logs_of(run: RunFiles, rank: int | None) -> list[Path]:
    """Returns the logs of the point's last start: of each rank or of one, and SLURM's log.

    Raises ConfigError if there are logs, but none of that rank.
    """
    logs = launch_dir(run.folder) / "logs"
    found = list(logs.glob(f"{run.job or 'local'}.*.log")) or list(logs.glob("*.*.log"))
    ranks = {_rank(path): path for path in sorted(found, key=lambda path: (time_of(path), path.name))}
    if rank is not None and ranks:
        if rank not in ranks:
            known = ", ".join(map(str, sorted(ranks)))
            raise ConfigError(f"--rank={rank} has no log at point {run.name}: give one of {known}")
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
        logs = logs_of(run, None)
        if logs:
            print(f"  {run.name}  {run.state}  {len(logs)} in {logs[0].parent}")


def _tail(path: Path, lines: int) -> tuple[str, int]:
    """Returns the last lines, all for lines=0, and the offset in bytes after them."""
    try:
        with open_own(path, "rb") as file:
            if lines:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            text = b"".join(deque(file, maxlen=lines or None)).decode("utf-8", errors="replace")
            return text + ("" if not text or text.endswith("\n") else "\n"), file.tell()
    except OSError as error:
        return f"(cannot be read: {error.strerror})\n", 0


def _follow(folder: Path, names: Sequence[str], rank: int | None, shown: dict[Path, int]) -> None:
    """Prints new lines, also of new files, until all points have ended."""
    last: Path | None = next(reversed(shown), None)
    over = False
    while not over:
        runs = select_runs(sweep_runs(folder), names)
        over = all(run.state in ENDED for run in runs)  # read before the logs, so that the last lines are printed
        for path in (path for run in runs for path in logs_of(run, rank)):
            text, size = _since(path, shown.get(path, 0))
            if text:
                print(("" if path == last else f"==> {path} <==\n") + text, end="", flush=True)
                last = path
            shown[path] = size
        if not over:
            time.sleep(_POLL_S)


def _since(path: Path, at: int) -> tuple[str, int]:
    """Returns the text from an offset in bytes on, and the new offset."""
    try:
        with open_own(path, "rb") as file:
            file.seek(at)
            found = file.read()
    except OSError:
        return "", at
    return found.decode("utf-8", errors="replace"), at + len(found)
