"""Script of a job: the directives of sbatch by submitit's executor, and what runs in the job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from clipx.compat import submission_text
from clipx.errors import Exit
from clipx_launch import snapshot
from clipx_launch.files import launch_dir
from clipx_launch.slurm_spec import SlurmSpec

_START = """\
# Each point's folder holds its configuration and logs in .launch, and the files of this job in .launch/JOB.
points=(
{points}
)
: "${{SLURM_JOB_ID:?submit this script by sbatch}}"
point="${{points[${{SLURM_ARRAY_TASK_ID:-0}}]}}"
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
files="$point/.launch/$job" logs="$point/.launch/logs"
ended=0
trap 'ended=1' TERM # SLURM ends the job: this script continues until the run has saved
(( ${{SLURM_RESTART_COUNT:-0}} )) || rm -rf "$files"
mkdir -p "$files" || exit
rm -f "$files"/{{requeue,result.json,lost.json,srun.log}}
"""
_RUN = """\
{environment}
export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"
# from SLURM 22.05 on srun does not inherit it
if [[ -n "${{SLURM_CPUS_PER_TASK:-}}" ]]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
export SLURM_EXPORT_ENV=ALL # srun passes on these variables, whatever sbatch passed to this script
max_num_timeout={max_num_timeout} max_preemption={max_preemption} max_retry={max_retry} max_stalled={max_stalled}
stopped={stopped} mem_gb={mem_gb}
code=0 tries=0 missing=""
for name in {passed}; do
  [[ -v $name ]] || missing+=" $name"
done

until [[ -e "$files/cancel" || -n "$missing" ]] || (( ended )); do
  (
  trap : TERM
  srun --kill-on-bad-exit=1 --unbuffered --open-mode=append --output="$logs/$job.%t.log" {srun_args}\\
    {python} -u -m {module} --job "$job" "$point" 2>&1 | (trap '' TERM; exec tee "$files/srun.log" >&2)
  exit "${{PIPESTATUS[0]}}"
  ) &
  run=$!
  wait "$run"
  code=$?
  while (( ended )) && [[ ! -e "$files/requeue" && ! -e "$files/result.json" ]] && kill -0 "$run" 2> /dev/null; do
    sleep 0.2
  done
  # srun could not start a rank, as when the controller is away for a while
  if (( ! code || ++tries > {srun_retries} )) || [[ -e "$files/requeue" || -e "$files/result.json" ]] ||
    ! grep -q '^srun: error: Unable to ' "$files/srun.log"; then
    break
  fi
  echo "srun could not start the run: try $tries of {srun_retries} in $((5 * tries)) s" >&2
  sleep $((5 * tries)) &
  wait "$!"
done

"""
_JOB_END = Path(__file__).with_name("job_end.sh")
_MAX_STALLED = 3  # time limits in a row without a newer checkpoint
_CPUS = 8  # of a rank
_SRUN_RETRIES = 10  # in 275 s and the time that srun waits for the controller


class _Executor(SlurmExecutor):
    """submitit's executor, also for a machine without SLURM, where it can print scripts alone."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def sbatch_script(
    spec: SlurmSpec, sweep: Path, points: Sequence[Path], code: Mapping[str, str], after: str | None = None
) -> str:
    """Returns the script of a job, or of a job array whose task k runs point k. Arguments: those of `executor_of`,
    `points` and `code` of `run_command`."""
    return str(submission_text(executor_of(spec, sweep, points, after), run_command(spec, code), ""))


def executor_of(spec: SlurmSpec, sweep: Path, points: Sequence[Path], after: str | None = None) -> SlurmExecutor:
    """Returns submitit's executor with the parameters of a job, or of a job array whose task k runs point k.

    `sweep` and `points` are folders, `after` is the job that must end before this one starts.
    """
    executor = _Executor(spec.submitit_folder or launch_dir(sweep))
    lines = "\n".join(shlex.quote(str(folder)) for folder in points)
    executor.update_parameters(
        **parameters(spec),
        additional_parameters=_other_directives(spec, sweep, len(points), after),
        setup=[_START.format(points=lines), *(spec.setup or [])],
        teardown=[_JOB_END.read_text(encoding="utf-8")],
        stderr_to_stdout=True,
        use_srun=False,  # run_command starts it again if it cannot start
        wckey=None,  # submitit's default, which a site with such keys would refuse
    )
    return executor


def parameters(spec: SlurmSpec) -> dict[str, Any]:
    """Returns the options of a job under submitit's names, without those that are not given."""
    of_spec = (
        "partition", "account", "qos", "constraint", "exclude", "comment", "nodes", "gres", "cpus_per_gpu",
        "mem_per_cpu", "mem_per_gpu", "signal_delay_s",
    )  # fmt: skip
    default_gpus = str(spec.tasks_per_node) if not spec.gpu_options else None
    values = {
        **{key: getattr(spec, key) for key in of_spec},
        "job_name": spec.name,
        "time": spec.timeout_min,
        "ntasks_per_node": spec.tasks_per_node,
        "cpus_per_task": spec.cpus_per_task or (None if spec.cpus_per_gpu else _CPUS),
        "gpus_per_node": default_gpus or (spec.gpus_per_node if spec.gpus else None),
        "gpus_per_task": spec.gpus_per_task if spec.gpus else None,
        "mem": None if spec.mem_gb is None else f"{spec.mem_gb * 1024:.0f}M",
    }
    return {key: value for key, value in values.items() if value is not None}


def _other_directives(spec: SlurmSpec, sweep: Path, points: int, after: str | None) -> dict[str, Any]:
    """Returns the directives that submitit has no parameter for, or sets otherwise."""
    values = {
        "array": f"0-{points - 1}%{min(points, spec.array_parallelism or points)}" if points > 1 else None,
        "dependency": f"afterany:{after}" if after else None,
        "chdir": str(Path.cwd()),
        "output": str(launch_dir(sweep) / "logs" / f"{'%A_%a' if points > 1 else '%j'}.log"),
        "requeue": True,
        **spec.additional_parameters,
        **_exported(spec),
    }
    return {key: value for key, value in values.items() if value not in (None, False)}


def _exported(spec: SlurmSpec) -> dict[str, str]:
    """Returns the option of sbatch by which `pass_environment` reaches a job that does not inherit all variables."""
    given = spec.additional_parameters.get("export", os.environ.get("SBATCH_EXPORT", "ALL"))
    names = [name for name in str(given).split(",") if name not in ("NONE", "NIL")]
    return {"export": ",".join([*names, *spec.pass_environment])} if spec.pass_environment else {}


def run_command(spec: SlurmSpec, code: Mapping[str, str]) -> str:
    """Returns the lines that start a run by srun. `code`: environment variables that locate the code."""
    variables = {name: value for name, value in code.items() if name != "PYTHONPATH"}
    return _RUN.format(
        environment=exports({"PYTHONUNBUFFERED": "1", **variables, **spec.environment}),
        code=shlex.quote(code["PYTHONPATH"]),
        python=spec.python or shlex.quote(sys.executable),
        srun_args="".join(f"{shlex.quote(option)} " for option in spec.srun_args),
        module=snapshot.MODULE,
        passed=" ".join(spec.pass_environment),
        mem_gb="" if spec.mem_gb is None else f"{spec.mem_gb:g}",
        srun_retries=_SRUN_RETRIES,
        max_num_timeout=spec.max_num_timeout,
        max_preemption="" if spec.max_preemption is None else spec.max_preemption,
        max_retry=spec.max_retry,
        max_stalled=_MAX_STALLED,
        stopped=int(Exit.REQUEUE),
    )


def exports(values: Mapping[str, str]) -> str:
    """Returns one export line per variable. Values are quoted, so that the shell expands nothing in them."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
