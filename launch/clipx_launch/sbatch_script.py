"""Text of a job's script: the directives that sbatch reads, and the body that bash runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipx.errors import Exit
from clipx_launch import snapshot
from clipx_launch.options import LaunchStyle, SlurmSpec
from clipx_launch.point import launch_dir

_SCRIPT = """\
# Each point's folder holds its configuration, logs and result in .launch.
points=(
{points}
)
point="${{points[${{SLURM_ARRAY_TASK_ID:-0}}]}}"
files="$point/.launch"
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
{setup}
{environment}
export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-}}" # from SLURM 22.05 on srun does not inherit it
rm -f "$files/requeue" "$files/result.json"

{command}
code=$?

# A run that saved after a signal writes the file `requeue`. An exit code cannot report it: srun ends the other tasks
# when the first one fails. After scancel, and if SLURM itself requeues the job, this script has been ended by now.
if [[ -e "$files/requeue" ]] || (( code == 138 )); then # 138: SIGUSR1, before Python could listen
  if (( ${{SLURM_RESTART_COUNT:-0}} < {max_requeue} )); then
    scontrol requeue "$SLURM_JOB_ID" && sleep 3600 # until SLURM ends this script
  fi
  echo "stopped and saved, but not requeued (hydra.launcher.max_requeue={max_requeue})" >&2
  code={stopped}
fi
if [[ ! -e "$files/result.json" ]]; then # a killed process cannot write it
  (( code )) || code=1
  printf '{{"state": "failed", "exit_code": %d, "error": "no rank reported an error: see the logs"}}\\n' "$code" \\
    > "$files/result.json"
fi
# srun may return the code of a rank that was ended after another one failed. The job returns the code of the first.
(( code )) && [[ "$(< "$files/result.json")" =~ '"exit_code": '([1-9][0-9]*) ]] && code="${{BASH_REMATCH[1]}}"
exit "$code"
"""

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
_TORCHRUN = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --wait=60 --unbuffered --open-mode=append --output="$files/logs/$job.%t.log" {srun}\\
  bash -c 'exec "$@" --node-rank="$SLURM_NODEID" -m {module} --requeue "$0"' "$point" \\
  {python} -u -m torch.distributed.run --nnodes={nodes} --nproc-per-node={tasks} \\
  --master-addr="$head" --master-port=$((15000 + SLURM_JOB_ID % 15000)) --signals-to-handle={signals}"""
_SRUN = """\
srun --kill-on-bad-exit=1 --unbuffered --open-mode=append --output="$files/logs/$job.%t.log" {srun}\\
  {python} -u -m {module} --requeue "$point\""""


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
    command = (_TORCHRUN if spec.style is LaunchStyle.torchrun else _SRUN).format(
        python=spec.python or shlex.quote(sys.executable),
        srun="".join(f"{shlex.quote(option)} " for option in spec.srun),
        module=snapshot.MODULE,
        nodes=spec.nodes,
        tasks=spec.tasks_per_node,
        signals=SIGNALS,
    )
    return _SCRIPT.format(
        points="\n".join(shlex.quote(str(folder)) for folder in points),
        setup="\n".join(spec.setup),
        environment=exports({"PYTHONUNBUFFERED": "1", **variables, **spec.variables}),
        code=shlex.quote(code["PYTHONPATH"]),
        command=command,
        max_requeue=spec.max_requeue,
        stopped=int(Exit.REQUEUE),
    )


def _directives(spec: SlurmSpec, sweep: Path, points: int, after: str | None) -> dict[str, Any]:
    """Returns the #SBATCH directives, by the names of sbatch's options."""
    torchrun = spec.style is LaunchStyle.torchrun
    values = {
        "array": f"0-{points - 1}%{min(points, spec.parallelism or points)}" if points > 1 else None,
        "dependency": f"afterany:{after}" if after else None,
        "job-name": spec.name,
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
        "nodes": spec.nodes,
        "ntasks-per-node": 1 if torchrun else spec.tasks_per_node,
        "cpus-per-task": spec.cpus_per_task * (spec.tasks_per_node if torchrun else 1),
        "gpus-per-node": spec.gpus_per_node or None,
        "mem": None if spec.mem_gb is None else f"{spec.mem_gb * 1024:.0f}M",
        "time": spec.minutes,
        "chdir": str(Path.cwd()),
        "output": str(launch_dir(sweep) / "logs" / f"{'%A_%a' if points > 1 else '%j'}.log"),
        "open-mode": "append",
        "requeue": True,
        "signal": f"USR1@{spec.signal_before_s}" if spec.signal_before_s else None,
        **{key.replace("_", "-"): value for key, value in spec.sbatch.items()},
    }
    return {key: value for key, value in values.items() if value not in (None, False)}


def exports(values: Mapping[str, str]) -> str:
    """Returns one export line per variable. Values are quoted, so that the shell expands nothing in them."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
