"""The state of a run: what its files say, and SLURM where it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clipx.run.lock import LOCK, Holder, read_holder
from clipx_launch.cluster import Job, SlurmError, final_states, queued_jobs
from clipx_launch.commands.run import Run, State
from clipx_launch.point import Result

_SILENT_S = 600.0  # nothing written for so long, a run that has not ended is called silent
_PENDING = {"PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "STOPPED"}
_RUNNING = {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"}


def jobs_of(runs: Sequence[Run]) -> dict[str, Job] | None:
    """The jobs of points that have not ended, by 123 or 123_4, as far as SLURM knows. None where it does not answer."""
    points = [run.point for run in runs if run.point is not None and run.point.job and not _has_ended(run.point.result)]
    if not points:
        return {}
    user = points[0].launch_dir.stat().st_uid  # whoever launched it
    try:
        found = queued_jobs(user)
        gone = {str(point.job_id) for point in points} - found.keys()
        return found | {name: Job(state) for name, state in final_states(gone).items()}
    except SlurmError:
        return None


def _has_ended(result: Result | None) -> bool:
    return result is not None and result.state in ("finished", "failed")


def state_of(run: Run, jobs: dict[str, Job] | None, now: float) -> tuple[State, str]:
    result = None if run.point is None else run.point.result
    if result is not None and _has_ended(result):
        return State(result.state), _first_line(result.error)
    job = None if jobs is None or run.job is None else jobs.get(run.job)
    if job is not None and job.state in _PENDING:
        return (State.waiting if result is None else State.requeued), job.reason
    if job is not None and job.state in _RUNNING:
        if result is None:
            return _active(run, now), ""
        if _stopped(_first_line(result.error)) is State.stopped:  # its script is about to put it back
            return State.requeued, ""
    if result is not None:
        return _stopped(_first_line(result.error)), _first_line(result.error)
    if run.point is None:
        return _without_point(run, now)
    if run.job is None:
        return _without_job(run, now)
    if jobs is None:
        return _active(run, now), "SLURM does not answer"
    return _without_result(run.job, job)


def _without_result(name: str, job: Job | None) -> tuple[State, str]:
    """Of a point whose job is over, and that left no result."""
    if job is None or job.state == "COMPLETED":
        return State.lost, f"its job {name} is gone, and left no result"
    state = State.cancelled if job.state.startswith("CANCELLED") else State.failed
    return state, f"its job {name} is {job.state.lower()}"


def _stopped(by: str) -> State:
    """SLURM sends SIGUSR1 before the time limit, SIGTERM when it, or somebody, ends the job."""
    return State.stopped if by.startswith("SIGUSR") else State.cancelled


def _without_point(run: Run, now: float) -> tuple[State, str]:
    last: dict[str, Any] = next((e for e in reversed(run.events) if e["event"] in ("start", "stopped", "end")), {})
    if last.get("event") == "end":
        return State.finished, ""
    if last.get("event") == "stopped":
        return _stopped(last["signal"]), f"{last['signal']} after step {last['step']:,}"
    if is_running(run, now) is False:
        return State.lost, "its process is gone"
    return _active(run, now), ""


def _without_job(run: Run, now: float) -> tuple[State, str]:
    """Of a point that runs on this machine, or whose script somebody else submits."""
    assert run.point is not None
    if is_running(run, now):
        return _active(run, now), ""
    launcher = launcher_of(run)
    if launcher is None:
        return State.waiting, "for its script to be submitted"
    if launcher.alive is False:
        return State.lost, f"its process is gone, and so is its launcher, {launcher}"
    if any(path.stat().st_mtime >= (run.point.submitted or 0) for path in run.point.logs.glob("local.*.log")):
        return State.starting, ""
    return State.waiting, f"for its turn, by {launcher}"


def launcher_of(run: Run) -> Holder | None:
    """The process of clipx_local that launched a point, dead or alive."""
    process = (run.launch or {}).get("process")
    try:
        return None if process is None else Holder(**process)
    except TypeError:
        return None


def is_running(run: Run, now: float) -> bool | None:
    """Whether a process holds the run's directory; None where none does."""
    holder = read_holder(run.folder)
    if holder is None:
        return None
    if (alive := holder.alive) is not None:
        return alive
    try:  # of another machine it is known by the lock's being kept fresh
        return now - (run.folder / LOCK).stat().st_mtime < _SILENT_S
    except FileNotFoundError:
        return None


def _active(run: Run, now: float) -> State:
    """Of a run that is at work as far as is known."""
    if not run.rows:
        return State.starting
    logs = [] if run.point is None else [path.stat().st_mtime for path in run.point.logs.glob("*")]
    signs = [run.rows[-1]["seconds"], *(event["time"] for event in run.events[-1:] if "time" in event), *logs]
    return State.silent if now - max(signs) > _SILENT_S else State.running


def _first_line(text: str | None) -> str:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")
