"""Job arrays through submitit: its executor, its parameters, its submission. What runs in the job is clipx's own.

submitit's runner in the job takes a pickled function, and ends as COMPLETED whatever it raises. Here the script starts
one task for each rank by srun, and the first that fails ends them all.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from clipx.config import checked
from clipx.data.write import made
from clipx.errors import Exit, require
from clipx.spec import RunSpec

from . import site, snapshot
from .following import follow
from .options import SlurmSpec, Style
from .point import files_of
from .sweep import Overrides, Planned, Sweep, submitted

if TYPE_CHECKING:
    from omegaconf import DictConfig

_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# Of the process that submits, where that is in a job itself: a job must not take them for its own.
_OF_A_JOB = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI)_(?!CONF$).*")
_OF_A_RANK = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(MASTER)_(ADDR|PORT)|TORCHELASTIC_.*")


def launch(context: HydraContext, config: DictConfig, overrides: Overrides, first: int) -> list[JobReturn]:
    """Submits the points, and waits for them where `wait` says so. Raises ClipxError, before anything is submitted."""
    spec: SlurmSpec = checked(config.hydra.launcher, "hydra.launcher.")
    sweeper = str(config.hydra.sweeper._target_)
    require(
        spec.wait or sweeper == _BASIC,
        f"hydra.launcher.wait=false gives no results, which {sweeper.rpartition('.')[2]} needs: "
        "add hydra.launcher.wait=true",
    )
    sweep = Sweep.composed(context, config, overrides, first)

    def rule(run: RunSpec) -> None:
        spec.check(run.distributed)
        run.data.check_ranks(spec.world)

    sweep.check(rule, dict if spec.dry_run else site.queue)
    if spec.dry_run:
        code = snapshot.environment(None) | ({"PYTHONPATH": "<a copy of the code>"} if spec.snapshot else {})
        print(Array(sweep.folder, spec, len(sweep.left)).text(script([p.point.folder for p in sweep.left], spec, code)))
        return sweep.returns(ended=False)
    site.check_site(spec)
    if sweep.left:
        _submit(sweep, spec)
    _tell(sweep)
    if not spec.wait:
        return sweep.returns(ended=False)
    follow(sweep, _states)
    return sweep.returns()


def _submit(sweep: Sweep, spec: SlurmSpec) -> None:
    """All of it or nothing: where SLURM refuses one array, those before it are cancelled."""
    files = files_of(sweep.folder)
    made(files / "logs", f"the sweep's folder {files}", "choose by hydra.sweep.dir")
    code = snapshot.environment(files / "code" if spec.snapshot else None)
    for planned in sweep.left:
        planned.point.make(planned.spec)
    most = site.max_array_size()
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
                site.told("scancel", *jobs)
            said = re.findall(r"sbatch: (?:error: )?(.+)", str(error)) or [" ".join(str(error).split())]
            raise site.SlurmError(f"sbatch refused the job, and nothing is submitted: {' '.join(said)}") from error
    sweep.keep("clipx_slurm")


def _submit_array(folder: Path, points: list[Planned], spec: SlurmSpec, code: dict[str, str], after: str | None) -> str:
    text = script([planned.point.folder for planned in points], spec, code)
    with redirect_stderr(StringIO()):  # sbatch's words are in submitit's error as well
        job = Array(folder, spec, len(points), after)._submit_command(text).job_id
    written = files_of(folder) / f"{job}_submission.sh"
    for task, planned in enumerate(points):
        submitted(planned, job, task if len(points) > 1 else None)
        own = planned.point.files / "script.sh"
        own.unlink(missing_ok=True)
        with suppress(OSError):  # another file system has no links to this one
            os.link(written, own)
    return job


class Array(SlurmExecutor):
    """submitit's executor for scripts: `%k` tasks at a time, one for each of `points=(…)`."""

    def __init__(self, folder: Path, spec: SlurmSpec, points: int, after: str | None = None) -> None:
        """`after`: the job after whose end this one begins."""
        super().__init__(files_of(folder))
        torchrun = spec.style is Style.torchrun
        optional = {
            "partition": spec.partition,
            "account": spec.account,
            "qos": spec.qos,
            "constraint": spec.constraint,
            "gpus_per_node": spec.gpus_per_node or None,
            "mem": None if spec.mem_gb is None else f"{spec.mem_gb * 1024:.0f}M",
            "dependency": None if after is None else f"afterany:{after}",
        }
        self.update_parameters(
            job_name=spec.name,
            nodes=spec.nodes,
            ntasks_per_node=1 if torchrun else spec.tasks_per_node,
            cpus_per_task=spec.cpus_per_task * (spec.tasks_per_node if torchrun else 1),
            time=spec.minutes,
            **{key: value for key, value in optional.items() if value is not None},
        )
        several = points > 1
        extra: dict[str, Any] = {
            "chdir": str(Path.cwd()),
            "output": str(files_of(folder) / "logs" / f"{'%A_%a' if several else '%j'}.log"),
            "requeue": True,
            **({"signal": f"USR1@{spec.signal_before_s}"} if spec.signal_before_s else {}),
            **{key.replace("_", "-"): value for key, value in spec.sbatch.items() if value not in (None, False)},
        }
        # submitit's own: its signal, an account key that sites refuse, a second file of errors, its srun.
        self.parameters |= {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": extra}
        if several:
            self.parameters |= {"map_count": points, "array_parallelism": spec.parallelism or points}

    @classmethod
    def affinity(cls) -> int:
        return 1  # whether there is a SLURM is `check_site`'s to say, and a dry run needs none

    def text(self, body: str) -> str:
        """The whole script."""
        return self._make_submission_file_text(body, "")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["env", *(f"--unset={name}" for name in inherited(os.environ)), "sbatch", str(submission_file_path)]


def inherited(names: Collection[str]) -> list[str]:
    """The variables among `names` that tell a process of its own job or its own rank."""
    in_job = "SLURM_JOB_ID" in names
    return [name for name in names if _OF_A_RANK.fullmatch(name) or (in_job and _OF_A_JOB.fullmatch(name))]


# ----------------------------------------------------------------------------------------------------- the script

_SCRIPT = """\
# What a point is and does is in its folder's .launch.
points=(
{points}
)
point="${{points[${{SLURM_ARRAY_TASK_ID:-0}}]}}"
files="$point/.launch"
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
{setup}
export {environment}
export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-}}" # which srun does not inherit from SLURM 22.05 on
rm -f "$files/requeue" "$files/result.json"

{command}
code=$?

# A run that was signalled and has saved leaves `requeue`. An exit code could not say so: of several tasks srun ends the
# others when the first one fails. After scancel, and where SLURM itself takes the job back, this script is over by now.
if [[ -e "$files/requeue" ]] || (( code == 138 )); then # 138: SIGUSR1, before Python could listen
  if (( ${{SLURM_RESTART_COUNT:-0}} < {max_requeue} )); then
    scontrol requeue "$SLURM_JOB_ID" && sleep 3600 # until SLURM ends this script
  fi
  echo "stopped and saved, but not put back into the queue (hydra.launcher.max_requeue={max_requeue})" >&2
  code={stopped}
fi
if [[ ! -e "$files/result.json" ]]; then # a process that was killed could not write it
  (( code )) || code=1
  printf '{{"state": "failed", "exit_code": %d, "error": "no rank could say why: see the logs"}}\\n' "$code" \\
    > "$files/result.json"
fi
# Of ranks that were ended because another one failed srun may give the code: the job's is that of the first.
(( code )) && [[ "$(< "$files/result.json")" =~ '"exit_code": '([1-9][0-9]*) ]] && code="${{BASH_REMATCH[1]}}"
exit "$code"
"""

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
_TORCHRUN = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --wait=60 --unbuffered --open-mode=append --output="$files/logs/$job.%t.log" {srun}\\
  bash -c 'exec "$@" --node-rank="$SLURM_NODEID" -m {module} --requeue "$0"' "$point" \\
  {python} -u -m torch.distributed.run --nnodes={nodes} --nproc-per-node={tasks} \\
  --master-addr="$head" --master-port=$((15000 + SLURM_JOB_ID % 15000)) --signals-to-handle={signals}"""
_SRUN = """\
srun --kill-on-bad-exit=1 --unbuffered --open-mode=append --output="$files/logs/$job.%t.log" {srun}\\
  {python} -u -m {module} --requeue "$point\""""


def script(folders: Sequence[Path], spec: SlurmSpec, code: dict[str, str]) -> str:
    """What follows after #SBATCH: runs the point of the task's number, and puts it back where it was stopped."""
    own = {name: value for name, value in code.items() if name != "PYTHONPATH"}
    values = {"PYTHONUNBUFFERED": "1", **own, **spec.environment}
    command = (_TORCHRUN if spec.style is Style.torchrun else _SRUN).format(
        python=spec.python or shlex.quote(sys.executable),
        srun="".join(f"{shlex.quote(option)} " for option in spec.srun),
        module=snapshot.MODULE,
        nodes=spec.nodes,
        tasks=spec.tasks_per_node,
        signals=_SIGNALS,
    )
    return _SCRIPT.format(
        points="\n".join(shlex.quote(str(folder)) for folder in folders),
        setup="\n".join(spec.setup),
        environment=" ".join(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        code=shlex.quote(code["PYTHONPATH"]),
        command=command,
        max_requeue=spec.max_requeue,
        stopped=int(Exit.REQUEUE),
    )


# --------------------------------------------------------------------------------------------------- afterwards


def _tell(sweep: Sweep) -> None:
    jobs = sorted({p.point.job for p in sweep.left if p.point.job}, key=int)
    done = sum(p.finished for p in sweep.planned)
    skipped = [f"{n} {what}" for n, what in ((done, "finished before"), (len(sweep.queued), "in the queue")) if n]
    here = f"{snapshot.MODULE.rpartition('.')[0]}.status"
    known = f" ({', '.join(skipped)})" if skipped else ""
    print(f"{sweep.folder}: {len(sweep.left)} of {len(sweep.planned)} points submitted{known}")
    for job in jobs:
        print(f"  job     {job}")
    print(f"  logs    {shlex.quote(str(sweep.planned[0].point.logs))}{', …' * (len(sweep.planned) > 1)}")
    print(f"  status  python -m {here} {shlex.quote(str(sweep.folder))}")
    if jobs:
        print(f"  cancel  scancel {' '.join(jobs)}", flush=True)


def _states(ids: Collection[str]) -> dict[str, str]:
    """Of jobs that wait or run, and of those that did, how SLURM says they ended."""
    waiting = site.queue()
    gone = [name for name in ids if name not in waiting]
    return waiting | dict.fromkeys(gone, "GONE") | site.ends(gone)
