"""Submits the points of a sweep as SLURM job arrays, through submitit's executor."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path

from hydra.core.utils import JobReturn
from submitit.core.utils import FailedJobError, FailedSubmissionError

from clipx.compat import submit_script
from clipx.errors import disk_error, require
from clipx.output import lose_output
from clipx.storage.local import ensure_folder, write_text
from clipx_launch import cluster, snapshot
from clipx_launch.files import FIX, launch_dir
from clipx_launch.options import LaunchSpec
from clipx_launch.progress import wait_for
from clipx_launch.sbatch_script import sbatch_script
from clipx_launch.slurm_spec import SlurmSpec
from clipx_launch.sweep import Planned, Sweep

# Variables of the submitting process if it runs in a job itself: the submitted job must not inherit them.
_JOB_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI)_(?!CONF$).*")
_RANK_VARIABLE = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(MASTER)_(ADDR|PORT)|TORCHELASTIC_.*")


def launch(sweep: Sweep, spec: SlurmSpec) -> list[JobReturn]:
    """Submits the points, and with `wait` waits for them. Raises ClipxError before anything is submitted."""
    if spec.dry_run:
        sweep.check(spec)
        code = snapshot.environment(None) | {"PYTHONPATH": "<a copy of the code>"}
        print(sbatch_script(spec, sweep.folder, _folders(sweep.pending), code), end="")
        return sweep.job_returns(ended=False)
    spec.check_environment()
    with sweep.locked():
        sweep.check(spec)
        cluster.check_site(spec)
        if sweep.pending:
            _submit(sweep, spec)
    _print_summary(sweep)
    if not spec.wait:
        return sweep.job_returns(ended=False)
    wait_for(sweep, _job_states)
    return sweep.job_returns()


def _folders(points: list[Planned]) -> list[Path]:
    return [planned.point.folder for planned in points]


def _create_folders(sweep: Sweep, submitted: float | None) -> dict[str, str]:
    """Creates the folders of the sweep and of its points. Returns the environment variables that locate the code."""
    files = launch_dir(sweep.folder)
    ensure_folder(files / "logs", f"the sweep's folder {files}", "set hydra.sweep.dir to")
    code = snapshot.environment(files / "code")
    sweep.create_points(submitted)
    return code


def print_script(sweep: Sweep, spec: LaunchSpec, launcher: str) -> list[JobReturn]:
    """Creates the folders of the points and prints their script, for `clipx-sweep script`.

    Queries SLURM only about jobs of an earlier launch: this machine may have none.
    """
    require(
        isinstance(spec, SlurmSpec),
        f"launcher={launcher} has no script for sbatch: give a launcher that inherits from clipx_slurm",
    )
    assert isinstance(spec, SlurmSpec)
    with sweep.locked():
        sweep.check(spec)
        require(bool(sweep.pending), f"all points of {sweep.folder} are finished or in the queue: nothing to submit")
        require(
            len(sweep.pending) <= cluster.DEFAULT_ARRAY_SIZE,
            f"{len(sweep.pending)} points are more than the {cluster.DEFAULT_ARRAY_SIZE} of a job array: launch them "
            "by hydra/launcher=clipx_slurm, or fewer at a time",
        )
        text = sbatch_script(spec, sweep.folder, _folders(sweep.pending), _create_folders(sweep, submitted=None))
        written = launch_dir(sweep.folder) / "script.sh"
        write_text(written, text, private=True)
        _link_script(written, sweep.pending)
        sweep.save(spec)
    print(text, end="")
    return sweep.job_returns(ended=False)


def _link_script(written: Path, points: list[Planned]) -> None:
    """Hard-links a script into the folder of each of its points."""
    for planned in points:
        link = planned.point.launch_dir / "script.sh"
        if link == written:  # the sweep's folder is that of its only point
            continue
        link.unlink(missing_ok=True)
        with suppress(OSError):  # hard links do not cross file systems
            os.link(written, link)


def _submit(sweep: Sweep, spec: SlurmSpec) -> None:
    """Submits all points or none: if SLURM refuses an array, cancels the arrays before it."""
    code = _create_folders(sweep, submitted=time.time())
    limit = cluster.max_array_size()
    points = sweep.pending
    jobs: list[str] = []
    try:
        for start in range(0, len(points), limit):
            # SLURM limits the running tasks of each array separately: arrays in sequence respect the limit together.
            after = jobs[-1] if jobs and spec.parallelism else None
            part = points[start : start + limit]
            jobs.append(_submit_array(sweep.folder, part, spec, code, after))
            _record_array(sweep.folder, part, jobs[-1])
        sweep.save(spec)
    except BaseException as error:
        if jobs:
            cluster.run_slurm("scancel", *jobs)
        if not isinstance(error, FailedJobError | FailedSubmissionError):
            raise
        lines = re.findall(r"sbatch: (?:error: )?(.+)", str(error)) or [" ".join(str(error).split())]
        raise cluster.SlurmError(f"sbatch refused the job, nothing was submitted: {' '.join(lines)}") from error


def _submit_array(folder: Path, points: list[Planned], spec: SlurmSpec, code: dict[str, str], after: str | None) -> str:
    text = sbatch_script(spec, folder, _folders(points), code, after)
    with redirect_stderr(StringIO()), _outside_job(spec):  # submitit's error repeats the message of sbatch
        try:
            return submit_script(launch_dir(folder), text)
        except OSError as error:
            raise disk_error(error, launch_dir(folder), FIX) from None


def _record_array(folder: Path, points: list[Planned], job: str) -> None:
    for task, planned in enumerate(points):
        planned.point.record_job(job, task if len(points) > 1 else None)
    written = launch_dir(folder) / f"{job}_submission.sh"
    written.chmod(0o600)  # it has the points' environment; a umask at its submission would be the job's, too
    _link_script(written, points)


@contextmanager
def _outside_job(spec: SlurmSpec) -> Iterator[None]:
    """Removes the variables of this process's job and rank, for sbatch passes its environment to the job.

    Also the site's SBATCH_EXPORT, which would take precedence over the script's option, if that follows from it.
    """
    own = [*job_variables(os.environ), *(["SBATCH_EXPORT"] if spec.pass_environment else [])]
    hidden = {name: os.environ.pop(name) for name in own if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def job_variables(names: Collection[str]) -> list[str]:
    """Returns the variables among `names` that describe the job or the rank of a process."""
    in_job = "SLURM_JOB_ID" in names
    return [name for name in names if _RANK_VARIABLE.fullmatch(name) or (in_job and _JOB_VARIABLE.fullmatch(name))]


# ----------------------------------------------------------------------------------------------- after submission


def _print_summary(sweep: Sweep) -> None:
    lose_output()
    jobs = sorted({p.point.job for p in sweep.pending if p.point.job}, key=int)
    done = sum(p.finished for p in sweep.planned)
    skipped = [f"{n} {what}" for n, what in ((done, "finished before"), (len(sweep.queued), "in the queue")) if n]
    known = f" ({', '.join(skipped)})" if skipped else ""
    print(f"{sweep.folder}: {len(sweep.pending)} of {len(sweep.planned)} points submitted{known}")
    for job in jobs:
        print(f"  job     {job}")
    for verb in ("status", "logs", *(["cancel"] if jobs else [])):
        print(f"  {verb:7} clipx-sweep {verb} {shlex.quote(str(sweep.folder))}", flush=True)


def _job_states(ids: Collection[str]) -> dict[str, str]:
    """Returns SLURM's states of pending and running jobs, and the final states of those of `ids` that have ended."""
    queued = {name: job.state for name, job in cluster.queued_jobs().items()}
    gone = [name for name in ids if name not in queued]
    return queued | dict.fromkeys(gone, "GONE") | cluster.final_states(gone)
