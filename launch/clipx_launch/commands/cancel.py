"""Ends points that wait or run: by scancel, or by SIGTERM to processes of this machine. What they trained is saved."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from clipx.errors import ClipxError, Exit
from clipx.run.lock import Holder, holder_of
from clipx_launch.cluster import told
from clipx_launch.commands.run import ENDED, Run, State
from clipx_launch.commands.runs import picked, sweep_runs
from clipx_launch.commands.state import at_work, keeper_of
from clipx_launch.point import Result


def cancel(folder: Path, names: Sequence[str]) -> None:
    """The points named, or all; says which. Raises ClipxError where one cannot be."""
    runs = sweep_runs(folder)
    active = [run for run in picked(runs, names) if run.state not in ENDED]
    if not active:
        print(f"nothing to cancel: {states(picked(runs, names))}")
        return
    _cancel_jobs([run for run in active if run.job])
    _cancel_processes([run for run in active if not run.job], all_of_them=not names)


def states(runs: Sequence[Run]) -> str:
    """How many are in which state."""
    counts = {state: sum(run.state is state for run in runs) for state in State}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _cancel_jobs(runs: Sequence[Run]) -> None:
    if not runs:
        return
    told("scancel", *(str(run.job) for run in runs))
    for run in runs:
        print(f"cancelled point {run.name}, job {run.job}, which was {run.state}")
        if run.state in (State.waiting, State.requeued):  # nobody else will say so, and SLURM soon forgets
            assert run.point is not None
            (run.point.files / "result.json").unlink(missing_ok=True)
            run.point.end(Result("stopped", Exit.ABORTED, error="cancelled in the queue"))


def _cancel_processes(runs: Sequence[Run], all_of_them: bool) -> None:
    """Where all are to end their launcher is told, which passes it on and starts no more."""
    left = list(runs)
    if all_of_them:
        for keeper in _unlike(keeper for run in runs if (keeper := keeper_of(run)) and keeper.alive):
            os.kill(keeper.pid, signal.SIGTERM)
            kept = [run for run in left if keeper_of(run) == keeper]
            left = [run for run in left if run not in kept]
            print(f"cancelled {states(kept)}: SIGTERM to their launcher, {keeper}")
    problems = [problem for run in left if (problem := _cancel_process(run))]
    if problems:
        raise ClipxError("; ".join(problems))


def _cancel_process(run: Run) -> str | None:
    """One point's process, whose ranks agree on when to stop. Returns why it cannot be."""
    holder = holder_of(run.folder)
    if holder is not None and holder.alive:
        os.kill(holder.pid, signal.SIGTERM)
        print(f"cancelled point {run.name}: SIGTERM to {holder}")
        return None
    if holder is not None and at_work(run, time.time()):
        return f"point {run.name} is at work as {holder}: cancel it there"
    keeper = keeper_of(run)
    if keeper is None:
        return f"point {run.name} was submitted by hand: cancel its job by scancel"
    where = "" if keeper.alive else f" on {keeper.host}"
    return f"point {run.name} has not begun, and cannot be cancelled alone: cancel the whole sweep{where}, {keeper}"


def _unlike(keepers: Iterator[Holder]) -> list[Holder]:
    return list(dict.fromkeys(keepers))
