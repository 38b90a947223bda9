"""Cancels points that wait or run. Running points get SIGTERM and save a checkpoint. scancel ends the jobs that have
not ended after some time: it would kill the run after SLURM's KillWait, by default 30 s."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clipx.errors import ClipxError, Exit, require
from clipx.run.lock import Holder, read_holder
from clipx.storage.local import write_text
from clipx_launch.cluster import SlurmError, queued_jobs, run_slurm
from clipx_launch.commands.run import ENDED, RunFiles, State
from clipx_launch.commands.runs import select_runs, sweep_runs
from clipx_launch.commands.state import is_running, launcher_of
from clipx_launch.files import launch_dir
from clipx_launch.point import Result

_POLL_S = 1.0


def cancel(sweep: Path, points: Sequence[str], wait: float) -> None:
    """Stops the named points that wait or run, by default all; running points save a checkpoint. Prints their names.

    Waits up to `wait` seconds until running jobs have saved. Raises ClipxError for points that it cannot stop.
    """
    require(0 <= wait < math.inf, f"--wait={wait} must be 0 s or more: the default is 120")
    runs = select_runs(sweep_runs(sweep), points)
    active = [run for run in runs if run.state not in ENDED]
    if not active:
        print(f"nothing to cancel: {count_states(runs)}")
        return
    _cancel_jobs([run for run in active if run.job], wait)
    of_sweep = not points and (launch_dir(sweep) / "sweep.json").is_file()
    _cancel_processes([run for run in active if not run.job], all_of_them=of_sweep)


def count_states(runs: Sequence[RunFiles]) -> str:
    """Returns the number of runs in each state, as text."""
    counts = Counter(run.state for run in runs)
    return ", ".join(f"{counts[state]} {state}" for state in State if counts[state])


def _cancel_jobs(runs: Sequence[RunFiles], wait_s: float) -> None:
    waiting = [run for run in runs if run.state in (State.waiting, State.requeued)]
    running = [run for run in runs if run not in waiting]
    _end_jobs(waiting)
    for run in waiting:  # no process writes a result, and SLURM drops the job soon
        assert run.point is not None
        (run.point.files / "result.json").unlink(missing_ok=True)
        run.point.write_result(Result("stopped", Exit.ABORTED, error="cancelled in the queue"))
        print(f"cancelled point {run.name}, job {run.job}, which was {run.state}")
    if running and wait_s:
        _wait_for_saves(running, wait_s)
    _end_jobs(running)
    for run in running:
        assert run.point is not None
        result = run.point.result
        newest = f"newest checkpoint: {run.checkpoints[0].folder.name}" if run.checkpoints else "it has no checkpoint"
        how = str(result.error or result.state) if result else f"it did not save within {wait_s:g} s, {newest}"
        print(f"cancelled point {run.name}, job {run.job}, which was {run.state}: {how}")


def _end_jobs(runs: Sequence[RunFiles]) -> None:
    queued = queued_jobs() if runs else {}
    if jobs := [str(run.job) for run in runs if run.job in queued]:
        run_slurm("scancel", "--quiet", *jobs)  # --quiet: no error for a job that has just ended


def _wait_for_saves(runs: Sequence[RunFiles], wait_s: float) -> None:
    """Sends SIGTERM to the processes of the jobs, and returns when they have saved. Their scripts do not requeue."""
    for run in runs:
        assert run.point is not None
        write_text(run.point.files / "cancel", "")
    waiting = f"waiting up to {wait_s:g} s (--wait) for them to save; after that scancel ends their jobs"
    print(f"SIGTERM to {count_states(runs)}: {waiting}", flush=True)
    with suppress(SlurmError):  # a job that has just ended
        run_slurm("scancel", "--quiet", "--signal=TERM", *(str(run.job) for run in runs))
    remaining, end = list(runs), time.monotonic() + wait_s
    while remaining and time.monotonic() < end:
        time.sleep(_POLL_S)
        queued = queued_jobs()
        remaining = [run for run in remaining if run.job in queued and run.point and run.point.result is None]


def _cancel_processes(runs: Sequence[RunFiles], all_of_them: bool) -> None:
    """Sends SIGTERM to the points. To cancel all, signals their launcher, which forwards it and starts no more."""
    remaining = list(runs)
    for launcher in dict.fromkeys(map(launcher_of, runs)) if all_of_them else ():
        if launcher is not None and launcher.alive:
            _terminate(launcher)
            stopping = [run for run in remaining if launcher_of(run) == launcher]
            remaining = [run for run in remaining if run not in stopping]
            print(f"cancelled {count_states(stopping)}: SIGTERM to their launcher, {launcher}")
    if problems := list(filter(None, map(_cancel_process, remaining))):
        raise ClipxError("; ".join(problems))


def _cancel_process(run: RunFiles) -> str | None:
    """Sends SIGTERM to a process of a point; its ranks agree on a step to stop at. Returns the reason if it cannot."""
    holder, launcher = read_holder(run.folder), launcher_of(run)
    if holder is not None and holder.alive:
        _terminate(holder)
        print(f"cancelled point {run.name}: SIGTERM to {holder}")
        return None
    if holder is not None and is_running(run, time.time()):
        return f"point {run.name} is running as {holder}: cancel it there"
    if launcher is None:
        return f"point {run.name} was submitted by hand: cancel its job with scancel"
    where = "" if launcher.alive else f" on {launcher.host}"
    return f"point {run.name} has not started and cannot be cancelled alone: cancel the whole sweep{where}, {launcher}"


def _terminate(process: Holder) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process.pid, signal.SIGTERM)
