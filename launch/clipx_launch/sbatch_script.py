"""Text of a job's script: the directives that sbatch reads, and the body that bash runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.errors import Exit
from clipx_launch import snapshot
from clipx_launch.files import launch_dir
from clipx_launch.slurm_spec import SlurmSpec

_SCRIPT = """\
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
{setup}
{environment}
export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-}}" # from SLURM 22.05 on srun does not inherit it
export SLURM_EXPORT_ENV=ALL # srun passes on these variables, whatever sbatch passed to this script
max_requeue={max_requeue} max_preemption={max_preemption} max_retry={max_retry} max_stalled={max_stalled}
stopped={stopped} mem_gb={mem_gb}
code=0 tries=0 missing=""
for name in {passed}; do
  [[ -v $name ]] || missing+=" $name"
done

until [[ -e "$files/cancel" || -n "$missing" ]] || (( ended )); do
  (
  trap : TERM
  srun --kill-on-bad-exit=1 --unbuffered --open-mode=append --output="$logs/$job.%t.log" {srun}\\
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
_SRUN_RETRIES = 10  # in 275 s and the time that srun waits for the controller


def sbatch_script(
    spec: SlurmSpec, sweep: Path, points: Sequence[Path], code: Mapping[str, str], after: str | None = None
) -> str:
    """Returns the whole script of a job, or of a job array whose task k runs point k.

    `sweep` and `points` are folders, `code` has the environment variables that locate the code, `after` is the job that
    must end before this one starts.
    """
    directives = _directives(spec, sweep, len(points), after).items()
    lines = [f"#SBATCH --{key}" + ("" if value is True else f"={shlex.quote(str(value))}") for key, value in directives]
    return "\n".join(["#!/bin/bash", *lines, "", _body(spec, points, code)])


def _body(spec: SlurmSpec, points: Sequence[Path], code: Mapping[str, str]) -> str:
    """Returns the part of the script after the directives."""
    variables = {name: value for name, value in code.items() if name != "PYTHONPATH"}
    script = _SCRIPT.format(
        points="\n".join(shlex.quote(str(folder)) for folder in points),
        setup="\n".join(spec.setup),
        environment=exports({"PYTHONUNBUFFERED": "1", **variables, **spec.environment}),
        code=shlex.quote(code["PYTHONPATH"]),
        python=spec.python or shlex.quote(sys.executable),
        srun="".join(f"{shlex.quote(option)} " for option in spec.srun),
        module=snapshot.MODULE,
        passed=" ".join(spec.pass_environment),
        mem_gb="" if spec.mem_gb is None else f"{spec.mem_gb:g}",
        srun_retries=_SRUN_RETRIES,
        max_requeue=spec.max_requeue,
        max_preemption="" if spec.max_preemption is None else spec.max_preemption,
        max_retry=spec.max_retry,
        max_stalled=_MAX_STALLED,
        stopped=int(Exit.REQUEUE),
    )
    return script + _JOB_END.read_text(encoding="utf-8")


def _directives(spec: SlurmSpec, sweep: Path, points: int, after: str | None) -> dict[str, Any]:
    """Returns the #SBATCH directives, by the names of sbatch's options."""
    values = {
        "array": f"0-{points - 1}%{min(points, spec.parallelism or points)}" if points > 1 else None,
        "dependency": f"afterany:{after}" if after else None,
        "job-name": spec.name,
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
        "nodes": spec.nodes,
        "ntasks-per-node": spec.tasks_per_node,
        "cpus-per-task": spec.cpus_per_task,
        "gpus-per-node": spec.gpus_per_node or None,
        "mem": None if spec.mem_gb is None else f"{spec.mem_gb * 1024:.0f}M",
        "time": spec.minutes,
        "chdir": str(Path.cwd()),
        "output": str(launch_dir(sweep) / "logs" / f"{'%A_%a' if points > 1 else '%j'}.log"),
        "open-mode": "append",
        "requeue": True,
        "signal": f"USR1@{spec.signal_before_s}" if spec.signal_before_s else None,
        **{key.replace("_", "-"): value for key, value in spec.sbatch.items()},
        **_exported(spec),
    }
    return {key: value for key, value in values.items() if value not in (None, False)}


def _exported(spec: SlurmSpec) -> dict[str, str]:
    """Returns the option of sbatch by which `pass_environment` reaches a job that does not inherit all variables."""
    others = str(spec.sbatch.get("export", os.environ.get("SBATCH_EXPORT", "ALL"))).split(",")
    names = [*(name for name in others if name not in ("NONE", "NIL")), *spec.pass_environment]
    return {"export": ",".join(names)} if spec.pass_environment else {}


def exports(values: Mapping[str, str]) -> str:
    """Returns one export line per variable. Values are quoted, so that the shell expands nothing in them."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
