"""Cancels points that wait or run: scancel for SLURM jobs, SIGTERM for processes of this machine. Running points save
a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from clipx.errors import ClipxError, Exit
from clipx.run.lock import read_holder
from clipx_launch.cluster import run_slurm
from clipx_launch.commands.run import ENDED, Run, State
from clipx_launch.commands.runs import select_runs, sweep_runs
from clipx_launch.commands.state import is_running, launcher_of
from clipx_launch.point import Result


def cancel(folder: Path, names: Sequence[str]) -> None:
    """Cancels the named points, by default all, and prints their names. Raises ClipxError for those that it cannot."""
    runs = sweep_runs(folder)
    active = [run for run in select_runs(runs, names) if run.state not in ENDED]
    if not active:
        print(f"nothing to cancel: {count_states(select_runs(runs, names))}")
        return
    _cancel_jobs([run for run in active if run.job])
    _cancel_processes([run for run in active if not run.job], all_of_them=not names)


def count_states(runs: Sequence[Run]) -> str:
    """Returns the number of runs in each state, as text."""
    counts = {state: sum(run.state is state for run in runs) for state in State}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _cancel_jobs(runs: Sequence[Run]) -> None:
    if not runs:
        return
    run_slurm("scancel", *(str(run.job) for run in runs))
    for run in runs:
        print(f"cancelled point {run.name}, job {run.job}, which was {run.state}")
        if run.state in (State.waiting, State.requeued):  # no process writes a result, and SLURM drops the job soon
            assert run.point is not None
            (run.point.launch_dir / "result.json").unlink(missing_ok=True)
            run.point.write_result(Result("stopped", Exit.ABORTED, error="cancelled in the queue"))


def _cancel_processes(runs: Sequence[Run], all_of_them: bool) -> None:
    """Sends SIGTERM to the points. To cancel all, signals their launcher, which forwards it and starts no more."""
    remaining = list(runs)
    if all_of_them:
        for launcher in dict.fromkeys(map(launcher_of, runs)):
            if launcher is None or not launcher.alive:
                continue
            os.kill(launcher.pid, signal.SIGTERM)
            stopping = [run for run in remaining if launcher_of(run) == launcher]
            remaining = [run for run in remaining if run not in stopping]
            print(f"cancelled {count_states(stopping)}: SIGTERM to their launcher, {launcher}")
    problems = [problem for run in remaining if (problem := _cancel_process(run))]
    if problems:
        raise ClipxError("; ".join(problems))


def _cancel_process(run: Run) -> str | None:
    """Sends SIGTERM to a process of a point; its ranks agree on a step to stop at. Returns the reason if it cannot."""
    holder = read_holder(run.folder)
    if holder is not None and holder.alive:
        os.kill(holder.pid, signal.SIGTERM)
        print(f"cancelled point {run.name}: SIGTERM to {holder}")
        return None
    if holder is not None and is_running(run, time.time()):
        return f"point {run.name} is running as {holder}: cancel it there"
    launcher = launcher_of(run)
    if launcher is None:
        return f"point {run.name} was submitted by hand: cancel its job with scancel"
    where = "" if launcher.alive else f" on {launcher.host}"
    return f"point {run.name} has not started and cannot be cancelled alone: cancel the whole sweep{where}, {launcher}"
