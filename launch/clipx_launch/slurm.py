"""Job arrays through submitit: its executor, its parameters, its submission. What runs in the job is clipx's own.

submitit's runner in the job takes a pickled function, and ends as COMPLETED whatever it raises. Here the script starts
one task for each rank by srun, and the first that fails ends them all.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from clipx.config.compose import checked
from clipx.errors import require
from clipx.storage.local import made
from clipx.trainer.spec import RunSpec
from clipx_launch import cluster, snapshot
from clipx_launch.options import SlurmSpec
from clipx_launch.point import files_of
from clipx_launch.progress import follow
from clipx_launch.sbatch_script import parameters, script, whole
from clipx_launch.sweep import Overrides, Planned, Sweep, submitted

if TYPE_CHECKING:
    from omegaconf import DictConfig

# What submitit has parameters for; it takes other words of sbatch's as they are.
_SUBMITITS = {
    *("job-name", "partition", "account", "qos", "constraint", "nodes", "ntasks-per-node", "cpus-per-task"),
    *("gpus-per-node", "mem", "time", "dependency"),
}
# Of the process that submits, where that is in a job itself: a job must not take them for its own.
_OF_A_JOB = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI)_(?!CONF$).*")
_OF_A_RANK = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(MASTER)_(ADDR|PORT)|TORCHELASTIC_.*")


def launch(context: HydraContext, config: DictConfig, overrides: Overrides, first: int) -> list[JobReturn]:
    """Submits the points, and waits for them where `wait` says so. Raises ClipxError, before anything is submitted."""
    spec: SlurmSpec = checked(config.hydra.launcher, "hydra.launcher.")
    sweeper = str(config.hydra.sweeper._target_).rpartition(".")[2]
    require(
        spec.wait or sweeper == "BasicSweeper",
        f"hydra.launcher.wait=false gives no results, which {sweeper} needs: "
        "add hydra.launcher.wait=true",
    )
    return start(Sweep.composed(context, config, overrides, first), spec)


def start(sweep: Sweep, spec: SlurmSpec) -> list[JobReturn]:
    """`launch` without composing."""

    def rule(run: RunSpec) -> None:
        spec.check(run.distributed)
        run.data.check_ranks(spec.world)

    sweep.check(rule, dict if spec.dry_run else cluster.queue)
    if spec.dry_run:
        code = snapshot.environment(None) | ({"PYTHONPATH": "<a copy of the code>"} if spec.snapshot else {})
        print(Array(sweep.folder, spec, len(sweep.left)).text(script([p.point.folder for p in sweep.left], spec, code)))
        return sweep.returns(ended=False)
    if not spec.submit:
        _print(sweep, spec)
        return sweep.returns(ended=False)
    cluster.check_site(spec)
    if sweep.left:
        _submit(sweep, spec)
    _tell(sweep)
    if not spec.wait:
        return sweep.returns(ended=False)
    follow(sweep, _states)
    return sweep.returns()


def _made(sweep: Sweep, spec: SlurmSpec) -> dict[str, str]:
    """Makes the sweep's folder and its points'. What the processes need to find the code."""
    files = files_of(sweep.folder)
    made(files / "logs", f"the sweep's folder {files}", "choose by hydra.sweep.dir")
    code = snapshot.environment(files / "code" if spec.snapshot else None)
    for planned in sweep.left:
        planned.point.make(planned.spec)
    return code


def _print(sweep: Sweep, spec: SlurmSpec) -> None:
    """The script of all points, on stdout. SLURM is not asked anything: this may be another machine."""
    require(bool(sweep.left), f"all points of {sweep.folder} are finished or in the queue: there is nothing to submit")
    require(
        len(sweep.left) <= cluster.USUAL_ARRAY,
        f"{len(sweep.left)} points are more than a job array's {cluster.USUAL_ARRAY}: launch them without "
        "submit=false, or fewer at a time",
    )
    text = whole(spec, [planned.point.folder for planned in sweep.left], sweep.folder, _made(sweep, spec))
    written = files_of(sweep.folder) / "script.sh"
    written.write_text(text, encoding="utf-8")
    _link(written, sweep.left)
    sweep.keep(spec)
    print(text, end="")


def _link(written: Path, points: list[Planned]) -> None:
    """Has each point keep its script."""
    for planned in points:
        own = planned.point.files / "script.sh"
        if own == written:  # the only point's folder is the sweep's
            continue
        own.unlink(missing_ok=True)
        with suppress(OSError):  # another file system has no links to this one
            os.link(written, own)


def _submit(sweep: Sweep, spec: SlurmSpec) -> None:
    """All of it or nothing: where SLURM refuses one array, those before it are cancelled."""
    code = _made(sweep, spec)
    most = cluster.max_array_size()
    points = sweep.left
    jobs: list[str] = []
    for start in range(0, len(points), most):
        part = points[start : start + most]
        # SLURM's limit of tasks at a time is each array's own: one after the other they keep to it together.
        after = jobs[-1] if jobs and spec.parallelism else None
        try:
            jobs.append(_submit_array(sweep.folder, part, spec, code, after))
        except (FailedJobError, FailedSubmissionError) as error:
            if jobs:
                cluster.told("scancel", *jobs)
            said = re.findall(r"sbatch: (?:error: )?(.+)", str(error)) or [" ".join(str(error).split())]
            raise cluster.SlurmError(f"sbatch refused the job, and nothing is submitted: {' '.join(said)}") from error
    sweep.keep(spec)


def _submit_array(folder: Path, points: list[Planned], spec: SlurmSpec, code: dict[str, str], after: str | None) -> str:
    text = script([planned.point.folder for planned in points], spec, code)
    with redirect_stderr(StringIO()):  # sbatch's words are in submitit's error as well
        job = Array(folder, spec, len(points), after)._submit_command(text).job_id
    written = files_of(folder) / f"{job}_submission.sh"
    for task, planned in enumerate(points):
        submitted(planned, job, task if len(points) > 1 else None)
    _link(written, points)
    return job


class Array(SlurmExecutor):
    """submitit's executor for scripts: `%k` tasks at a time, one for each of `points=(…)`."""

    def __init__(self, folder: Path, spec: SlurmSpec, points: int, after: str | None = None) -> None:
        """`after`: the job after whose end this one begins."""
        super().__init__(files_of(folder))
        values = parameters(spec, folder, points) | ({"dependency": f"afterany:{after}"} if after else {})
        self.update_parameters(**{key.replace("-", "_"): values.pop(key) for key in _SUBMITITS & values.keys()})
        # submitit's own: its signal, an account key that sites refuse, a second file of errors, its srun.
        self.parameters |= {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": values}
        if points > 1:
            self.parameters |= {"map_count": points, "array_parallelism": spec.parallelism or points}

    @classmethod
    def affinity(cls) -> int:
        return 1  # whether there is a SLURM is `check_site`'s to say, and a dry run needs none

    def text(self, body: str) -> str:
        """The whole script."""
        return self._make_submission_file_text(body, "")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = super()._make_submission_file_text(command, uid)
        own = "signal" in self.parameters["additional_parameters"]
        return text if own else re.sub(r"^#SBATCH --signal=.*\n", "", text, flags=re.M)  # submitit's

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["env", *(f"--unset={name}" for name in inherited(os.environ)), "sbatch", str(submission_file_path)]


def inherited(names: Collection[str]) -> list[str]:
    """The variables among `names` that tell a process of its own job or its own rank."""
    in_job = "SLURM_JOB_ID" in names
    return [name for name in names if _OF_A_RANK.fullmatch(name) or (in_job and _OF_A_JOB.fullmatch(name))]


# --------------------------------------------------------------------------------------------------- afterwards


def _tell(sweep: Sweep) -> None:
    jobs = sorted({p.point.job for p in sweep.left if p.point.job}, key=int)
    done = sum(p.finished for p in sweep.planned)
    skipped = [f"{n} {what}" for n, what in ((done, "finished before"), (len(sweep.queued), "in the queue")) if n]
    known = f" ({', '.join(skipped)})" if skipped else ""
    print(f"{sweep.folder}: {len(sweep.left)} of {len(sweep.planned)} points submitted{known}")
    for job in jobs:
        print(f"  job     {job}")
    for verb in ("status", "logs", *(["cancel"] if jobs else [])):
        print(f"  {verb:7} python -m clipx_launch {verb} {shlex.quote(str(sweep.folder))}", flush=True)


def _states(ids: Collection[str]) -> dict[str, str]:
    """Of jobs that wait or run, and of those that did, how SLURM says they ended."""
    waiting = cluster.queue()
    gone = [name for name in ids if name not in waiting]
    return waiting | dict.fromkeys(gone, "GONE") | cluster.ends(gone)
