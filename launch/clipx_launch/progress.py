"""Waits for points and prints their states: a live table on a terminal, elsewhere a line for each change."""

from __future__ import annotations

import time
from contextlib import suppress

from rich.live import Live

from clipx.output import lose_output
from clipx.report.console import stdout_console, text_table
from clipx_launch.cluster import Job, SlurmError, find_jobs
from clipx_launch.point import Point, Result
from clipx_launch.sweep import Sweep

_POLL_S, _MAX_POLL_S = 1.0, 15.0


class ProgressDisplay:
    """Display of the state of each point."""

    def __init__(self, sweep: Sweep) -> None:
        self._typed = {p.point.label: sweep.varied(p.point.index) for p in sweep.planned}
        self._states: dict[str, str] = {}
        lose_output()
        self._console = stdout_console()
        self._live = Live(console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, label: str, state: str) -> None:
        """Displays the state of a point, if it has changed."""
        if self._states.get(label) == state:
            return
        self._states[label] = state
        if self._live:
            rows = [(name, typed, self._states[name]) for name, typed in self._typed.items() if name in self._states]
            self._live.update(text_table(("point", "overrides", "state"), rows))
        else:
            self._console.print("  ".join(filter(None, (f"point {label}", self._typed[label], state))))

    def print(self, line: str) -> None:
        """Prints a line of a point, above the table."""
        self._console.print(line)


def summary(result: Result) -> str:
    """Formats a result: its state, its value and the first line of its error."""
    value = "" if result.value is None else f" {result.value:.4g}"
    return f"{result.state}{value}" + ("" if result.error is None else f": {result.error.splitlines()[0]}")


def wait_for(sweep: Sweep) -> None:
    """Returns when each point or its job has ended.

    A job counts as ended after two polls: a shared file system may deliver the result later than SLURM the job's end.
    """
    points = [planned.point for planned in sweep.planned]
    over: set[str] = set()
    start = time.monotonic()
    with ProgressDisplay(sweep) as board:
        while points:
            with suppress(SlurmError):  # SLURM is busy: the next poll asks again
                jobs = find_jobs({point.job_id for point in points if point.job_id})
                points = [point for point in points if not _ended(point, jobs, over, board)]
            sweep.watch()
            if points:  # the interval grows from 1 s to 15 s, for runs take days
                time.sleep(min(_POLL_S + 0.01 * (time.monotonic() - start), _MAX_POLL_S))


def _ended(point: Point, jobs: dict[str, Job], over: set[str], board: ProgressDisplay) -> bool:
    result = point.result
    if result is None or result.state == "stopped":
        name = str(point.job_id)
        job = jobs.get(name, Job("GONE"))
        if not job.ended:
            over.discard(point.label)
            board.show(point.label, f"{job.state.lower()}, job {name}")
            return False
        if point.label not in over:
            over.add(point.label)
            return False
        point.write_result(point.not_started() or Result("failed", 1, error=job.failure(name)))
    board.show(point.label, summary(point.result or Result("failed", 1)))
    return True
