"""Submits the points of a sweep as SLURM job arrays, through submitit's executor."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import cast

from hydra.core.utils import JobReturn
from submitit.core.core import Job
from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths

from clipx.compat import submit_command
from clipx.errors import disk_error, require, require_effect
from clipx.output import lose_output
from clipx.storage.local import ensure_folder, write_text
from clipx_launch import cluster, snapshot
from clipx_launch.commands.run import ENDED, State
from clipx_launch.commands.runs import sweep_runs
from clipx_launch.files import FIX, launch_dir
from clipx_launch.options import LaunchSpec
from clipx_launch.planned import Planned
from clipx_launch.progress import wait_for
from clipx_launch.sbatch_script import executor_of, run_command, sbatch_script
from clipx_launch.site_check import expected_start
from clipx_launch.slurm_spec import SlurmSpec
from clipx_launch.sweep import Sweep

_Array = dict[int, Planned]  # points of a job array by task; of a job, task 0


def launch(sweep: Sweep, spec: SlurmSpec) -> list[JobReturn]:
    """Submits the points, and with `wait` waits for them. Raises ClipxError before anything is submitted."""
    if spec.dry_run:
        return print_script(sweep, spec, "clipx_slurm", ready=False)
    spec = _without_gpus(spec, sweep)
    spec.check_environment()
    start, after = "", _after(spec)
    with sweep.locked():
        sweep.check(spec)
        if sweep.pending:
            first = sweep.pending[0]
            start = expected_start(_options_of(first, spec), sweep.folder, first.point.folder)
            _submit(sweep, spec, after)
    _print_summary(sweep, start)
    if not spec.wait:
        return sweep.job_returns(ended=False)
    wait_for(sweep)
    return sweep.job_returns()


def print_script(sweep: Sweep, spec: LaunchSpec, launcher: str, ready: bool = True) -> list[JobReturn]:
    """Prints the script of the points. `ready`: also creates their folders, so that sbatch accepts the script.

    Queries SLURM only about jobs of an earlier launch: this machine may have none.
    """
    require(
        isinstance(spec, SlurmSpec),
        f"launcher={launcher} has no script for sbatch: give a launcher that inherits from clipx_slurm",
    )
    assert isinstance(spec, SlurmSpec)
    then = f"hydra.launcher.then=[{', '.join(spec.then)}]"
    require_effect(not (ready and spec.then), then, "in a script that is submitted by hand")
    spec = _without_gpus(spec, sweep)
    with sweep.locked() if ready else nullcontext():
        sweep.check(spec)
        require(bool(sweep.pending), f"all points of {sweep.folder} are finished or in the queue: nothing to submit")
        chains = list(_chains(sweep.pending, cluster.DEFAULT_ARRAY_SIZE))
        require(
            len(chains) == 1,
            f"{len(sweep.pending)} points are more than the {cluster.DEFAULT_ARRAY_SIZE} of a job array: launch them "
            "by hydra/launcher=clipx_slurm, or fewer at a time",
        )
        located = {**snapshot.environment(None), "PYTHONPATH": "<a copy of the code>"}
        code = _create_folders(sweep, submitted=None) if ready else located
        waits = [_after(spec), *("<the job before>" for _ in chains[0][1:])]
        text = "\n".join(
            sbatch_script(
                _options_of(_first(array), spec), sweep.folder, _folders(array), code, wait, _first(array).continues
            )
            for array, wait in zip(chains[0], waits, strict=True)
        )
        if ready:
            written = launch_dir(sweep.folder) / "script.sh"
            write_text(written, text, private=True)
            _link_script(written, sweep.pending)
            sweep.save(spec)
    print(text, end="")
    return sweep.job_returns(ended=False)


def _without_gpus(spec: SlurmSpec, sweep: Sweep) -> SlurmSpec:
    """Returns the options without GPUs if none are asked for and all points compute on the CPU."""
    devices = {planned.device for planned in sweep.planned if planned.after is None}
    return replace(spec, gpus_per_node="0") if devices == {"cpu"} and not spec.gpu_options else spec


def _after(spec: SlurmSpec) -> str:
    """Returns the dependency by `after`, empty if all its jobs have finished. Raises ConfigError if one cannot."""
    if spec.after is None or re.fullmatch(r"\d+(_\d+)?", spec.after):
        return f"afterok:{spec.after}" if spec.after else ""
    runs = [run for run in sweep_runs(Path(spec.after)) if run.state not in (State.finished, State.pruned)]
    for run in runs:
        require(
            run.state not in ENDED and run.job is not None,
            f"hydra.launcher.after={spec.after}: {run.name} is {run.state}, and no job of SLURM will finish it: "
            "resume it first",
        )
    return ":".join(["afterok", *(str(run.job) for run in runs)]) if runs else ""


# ------------------------------------------------------------------------------------------------ job arrays


def _chains(pending: Sequence[Planned], limit: int) -> Iterator[list[_Array]]:
    """Yields arrays of at most `limit` points that follow none of these, each with those that follow it in turn."""
    following = {planned.after.folder: planned for planned in pending if planned.after is not None}
    own = {planned.point.folder for planned in pending}
    heads = [planned for planned in pending if planned.after is None or planned.after.folder not in own]

    def of_array(planned: Planned) -> tuple[str, str]:
        return planned.point.command, _dependency(planned)

    for _, group in itertools.groupby(sorted(heads, key=of_array), of_array):
        points = list(group)
        for start in range(0, len(points), limit):
            array, chain = dict(enumerate(points[start : start + limit])), list[_Array]()
            while array:
                chain.append(array if len(array) > 1 else dict(enumerate(array.values())))
                after = {task: following.get(planned.point.folder) for task, planned in array.items()}
                array = {task: planned for task, planned in after.items() if planned is not None}
            yield chain


def _options_of(planned: Planned, spec: SlurmSpec) -> SlurmSpec:
    """Returns the options of the job of a point."""
    options = planned.options(spec)
    return replace(options, name=f"{spec.name}-{planned.point.command}") if spec.name and planned.after else options


def _dependency(planned: Planned) -> str:
    """Returns the dependency of a point on the one that it follows. Empty if that has finished."""
    return "" if planned.ready or planned.after is None else f"afterok:{planned.after.job_id}"


def _first(array: _Array) -> Planned:
    return next(iter(array.values()))


def _folders(array: Mapping[int, Planned]) -> dict[int, Path]:
    return {task: planned.point.folder for task, planned in array.items()}


def _create_folders(sweep: Sweep, submitted: float | None) -> dict[str, str]:
    """Creates the folders of the sweep and of its points. Returns the environment variables that locate the code."""
    files = launch_dir(sweep.folder)
    ensure_folder(files / "logs", f"the sweep's folder {files}", "set hydra.sweep.dir to")
    code = snapshot.environment(files / "code")
    sweep.create_points(submitted)
    return code


def _link_script(written: Path, points: Sequence[Planned]) -> None:
    """Hard-links a script into the folder of each of its points."""
    for planned in points:
        link = planned.point.launch_dir / "script.sh"
        if link == written:  # the sweep's folder is that of its only point
            continue
        link.unlink(missing_ok=True)
        with suppress(OSError):  # hard links do not cross file systems
            os.link(written, link)


def _submit(sweep: Sweep, spec: SlurmSpec, after: str = "") -> None:
    """Submits all points or none: if SLURM refuses an array, cancels the arrays before it. `after`: dependency of the
    points that follow no other one."""
    code = _create_folders(sweep, submitted=time.time())
    jobs: list[str] = []
    try:
        for chain in _chains(sweep.pending, cluster.max_array_size()):
            # SLURM limits the running tasks of each array separately: arrays in sequence respect the limit together.
            limited = f"afterany:{jobs[-1]}" if jobs and spec.array_parallelism else ""
            for array in chain:
                own = _dependency(_first(array))
                if array is chain[0]:
                    waits = [limited, after, own]
                else:
                    waits = [f"aftercorr:{jobs[-1]}" if len(array) > 1 else own]  # aftercorr: task k after task k
                job = _submit_array(sweep.folder, array, spec, code, ",".join(filter(None, waits)))
                jobs.append(job.job_id)
                _record_array(array, job)
        sweep.save(spec)
    except BaseException as error:
        if jobs:
            cluster.run_slurm("scancel", *jobs)
        if not isinstance(error, FailedJobError | FailedSubmissionError):
            raise
        lines = re.findall(r"sbatch: (?:error: )?(.+)", str(error)) or [" ".join(str(error).split())]
        raise cluster.SlurmError(f"sbatch refused the job, nothing was submitted: {' '.join(lines)}") from error


def _submit_array(folder: Path, array: _Array, spec: SlurmSpec, code: dict[str, str], dependency: str) -> Job[None]:
    first = _first(array)
    spec = _options_of(first, spec)
    executor = executor_of(spec, folder, _folders(array), dependency)
    scripts = JobPaths.get_first_id_independent_folder(executor.folder)
    ensure_folder(scripts, f"the folder of scripts {scripts}", "set hydra.launcher.submitit_folder to")
    with redirect_stderr(StringIO()), cluster.outside_job(spec):  # submitit's error repeats the message of sbatch
        try:
            return cast("Job[None]", submit_command(executor, run_command(spec, folder, code, first.continues)))
        except OSError as error:
            raise disk_error(error, executor.folder, FIX) from None


def _record_array(array: _Array, job: Job[None]) -> None:
    for task, planned in array.items():
        planned.point.record_job(job.job_id, task if len(array) > 1 else None)
    written = job.paths.submission_file
    written.chmod(0o600)  # it has the points' environment; a umask at its submission would be the job's, too
    _link_script(written, list(array.values()))


def _print_summary(sweep: Sweep, start: str) -> None:
    lose_output()
    jobs = sorted({p.point.job for p in sweep.pending if p.point.job}, key=int)
    done = sum(p.finished for p in sweep.planned)
    skipped = [f"{n} {what}" for n, what in ((done, "finished before"), (len(sweep.queued), "in the queue")) if n]
    known = f" ({', '.join(skipped)})" if skipped else ""
    print(f"{sweep.folder}: {len(sweep.pending)} of {len(sweep.planned)} points submitted{known}")
    for job in jobs:
        print(f"  job     {job}")
    if start:
        print(f"  start   {start}")
    for verb in ("status", "logs", *(["cancel"] if jobs else [])):
        print(f"  {verb:7} clipx-sweep {verb} {shlex.quote(str(sweep.folder))}", flush=True)
