"""Derives the state of a run from its files, and from SLURM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clipx.errors import Exit
from clipx.run.lock import LOCK, Holder, read_holder
from clipx_launch.cluster import Job, SlurmError, find_jobs
from clipx_launch.commands.run import RunFiles, State
from clipx_launch.point import Result

_SILENT_S = 600.0  # a run that has not ended is silent after writing nothing for this time
_LONGEST = 1000  # characters of a reason
_RUNNING = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"}


def jobs_of(runs: Sequence[RunFiles]) -> dict[str, Job] | None:
    """Returns SLURM's jobs of points that have not ended, by id: 123 or 123_4. None if SLURM does not respond."""
    points = [run.point for run in runs if run.point is not None and run.point.job and not _has_ended(run.result)]
    if not points:
        return {}
    try:
        user = points[0].launch_dir.stat().st_uid  # the user who launched it
        return find_jobs({str(point.job_id) for point in points}, user)
    except (SlurmError, OSError):
        return None


def _has_ended(result: Result | None) -> bool:
    return result is not None and (result.done or result.state == "failed")


def state_of(run: RunFiles, jobs: dict[str, Job] | None, now: float) -> tuple[State, str]:
    """Returns the state of a run and its reason. `jobs` is the result of `jobs_of`, `now` seconds since 1970."""
    result = run.result
    if result is not None and result.exit_code == Exit.IN_USE and is_running(run, now):  # by another process
        return _active(run, now), _first_line(result.error)
    if result is not None and _has_ended(result):
        return State(result.state), _first_line(result.error)
    job = None if jobs is None or run.job is None else jobs.get(run.job)
    if job is not None and not job.ended and job.state not in _RUNNING:
        return (State.waiting if result is None else State.requeued), _waits_for(run) or job.reason
    if job is not None and job.state in _RUNNING:
        if result is None:
            return _active(run, now), ""
        by = _first_line(result.error)
        if _stopped(by) is State.stopped:  # its script is about to requeue it
            return State.requeued, ""
        # Its script asks SLURM what has ended it.
        if run.point is not None and not (run.point.files / "cancel").exists():
            return _active(run, now), by
    if result is not None:
        preempted = job is not None and job.state == "PREEMPTED"
        state = State.preempted if preempted else _stopped(_first_line(result.error))
        return state, _first_line(result.error)
    if run.point is None:
        return _without_point(run, now)
    if run.job is None:
        return _without_job(run, now)
    if jobs is None:
        return _active(run, now), "SLURM does not respond"
    if (not_started := run.point.not_started()) is not None and (job is None or job.ended):
        return State.cancelled, str(not_started.error)
    return _without_result(run.job, job)


def _waits_for(run: RunFiles) -> str:
    """Returns the point that must finish before a point that waits. Empty if there is none."""
    if run.point is None or run.point.not_started() is None:
        return ""
    return f"after {os.path.relpath(str(run.point.before), run.sweep or run.folder.parent)}"


def _without_result(name: str, job: Job | None) -> tuple[State, str]:
    """Returns the state of a point whose job has ended without a result."""
    if job is None or job.state == "COMPLETED":
        return State.lost, f"job {name} is gone and left no result"
    states = {"CANCELLED": State.cancelled, "PREEMPTED": State.preempted}
    return states.get(job.state, State.failed), job.failure(name)


def _stopped(by: str) -> State:
    """Returns the state after a signal: SLURM sends SIGUSR2 before the time limit, SIGTERM to end the job."""
    return State.stopped if by.startswith("SIGUSR") else State.cancelled


def _without_point(run: RunFiles, now: float) -> tuple[State, str]:
    last: dict[str, Any] = next((e for e in reversed(run.events) if e["event"] in ("start", "stopped", "end")), {})
    if last.get("event") == "end":
        ended = State.pruned if last.get("ending") == State.pruned else State.finished
        return ended, _first_line(str(last.get("message", "")))
    if last.get("event") == "stopped":
        signal = last.get("signal", "a signal")
        return _stopped(signal), f"{_first_line(signal)} after step {last.get('step', 0):,}"
    if is_running(run, now) is False:
        return State.lost, "its process has ended without a result"
    return _active(run, now), ""


def _without_job(run: RunFiles, now: float) -> tuple[State, str]:
    """Returns the state of a point without a job number: of clipx_local, or of a printed script."""
    assert run.point is not None
    if is_running(run, now):
        return _active(run, now), ""
    launcher = launcher_of(run)
    if launcher is None and run.point.submitted is not None:
        return State.lost, "it was not submitted"
    if launcher is None:
        return State.waiting, "its script has not been submitted"
    started = any(time_of(path) >= (run.point.submitted or 0) for path in run.point.logs.glob("local.*.log"))
    if launcher.alive is False and not started:
        return State.lost, f"not started: its launcher, {launcher}, has ended"
    if launcher.alive is False:
        return State.lost, f"its process and its launcher, {launcher}, have ended without a result"
    if started:
        return State.starting, ""
    return State.waiting, _waits_for(run) or f"in the queue of {launcher}"


def launcher_of(run: RunFiles) -> Holder | None:
    """Returns the process of clipx_local that launched a point, which may have ended. None for other launchers."""
    return None if run.launch is None else run.launch.process


def is_running(run: RunFiles, now: float) -> bool | None:
    """Returns True if the process that locks the run's directory is alive. None if no process locks it."""
    holder = read_holder(run.folder)
    if holder is None:
        return None
    if (alive := holder.alive) is not None:
        return alive
    return now - time_of(run.folder / LOCK) < _SILENT_S  # on another machine a live process refreshes the lock


def _active(run: RunFiles, now: float) -> State:
    """Returns the state of a run that is active as far as known: starting, running or silent."""
    if not run.rows and (run.point is None or run.point.trains):
        return State.starting
    logs = [] if run.point is None else list(map(time_of, run.point.logs.glob("*")))
    signs = [0.0, *(row["seconds"] for row in run.rows[-1:]), *(event["time"] for event in run.events[-1:]), *logs]
    return State.silent if now - max(signs) > _SILENT_S else State.running


def time_of(path: Path) -> float:
    """Returns when a file was written, in seconds since 1970; 0 for one that is gone or unreadable."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _first_line(text: str | None) -> str:
    return next((line.strip()[:_LONGEST] for line in (text or "").splitlines() if line.strip()), "")
