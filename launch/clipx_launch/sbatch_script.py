"""Script of a job: the directives of sbatch by submitit's executor, and what runs in the job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from clipx.compat import submission_text
from clipx.errors import Exit
from clipx_launch import snapshot
from clipx_launch.files import launch_dir
from clipx_launch.slurm_spec import SlurmSpec

_HERE = Path(__file__).parent
_MAX_STALLED = 3  # time limits in a row without a newer checkpoint
_CPUS = 8  # of a rank


class _Executor(SlurmExecutor):
    """submitit's executor, also for a machine without SLURM, where it can print scripts alone."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def sbatch_script(
    spec: SlurmSpec,
    sweep: Path,
    points: Mapping[int, Path],
    code: Mapping[str, str],
    dependency: str = "",
    continues: bool = False,
) -> str:
    """Returns the script of a job, or of a job array whose task k runs point k.

    The arguments are those of `executor_of` and `run_command`.
    """
    executor = executor_of(spec, sweep, points, dependency)
    return str(submission_text(executor, run_command(spec, sweep, code, continues), ""))


def executor_of(spec: SlurmSpec, sweep: Path, points: Mapping[int, Path], dependency: str = "") -> SlurmExecutor:
    """Returns submitit's executor with the parameters of a job, or of a job array whose task k runs point k.

    `sweep` and `points` are folders, `dependency` is that of sbatch.
    """
    executor = _Executor(spec.submitit_folder or launch_dir(sweep))
    folders = [f"[{task}]={shlex.quote(str(folder))}" for task, folder in points.items()]
    start = ["points=(", *folders, ")", _bash("job_start")]
    executor.update_parameters(
        **_parameters(spec, sweep),
        additional_parameters=_other_directives(spec, sweep, list(points), dependency),
        setup=[*start, *(spec.setup or [])],
        teardown=[_bash("job_end")],
        stderr_to_stdout=True,
        use_srun=False,  # run_command starts it again if it cannot start
        wckey=None,  # submitit's default, which a site with such keys would refuse
    )
    return executor


def _parameters(spec: SlurmSpec, sweep: Path) -> dict[str, Any]:
    """Returns the options of a job under submitit's names, without those that are not given."""
    of_spec = (
        "partition", "account", "qos", "constraint", "exclude", "nodes", "gres", "cpus_per_gpu",
        "mem_per_cpu", "mem_per_gpu", "signal_delay_s",
    )  # fmt: skip
    default_gpus = str(spec.tasks_per_node) if not spec.gpu_options else None
    values = {
        **{key: getattr(spec, key) for key in of_spec},
        "job_name": spec.name or sweep.name,
        "comment": spec.comment or str(sweep),
        "time": spec.timeout_min,
        "ntasks_per_node": spec.tasks_per_node,
        "cpus_per_task": spec.cpus_per_task or (None if spec.cpus_per_gpu else _CPUS),
        "gpus_per_node": default_gpus or (spec.gpus_per_node if spec.gpus else None),
        "gpus_per_task": spec.gpus_per_task if spec.gpus else None,
        "mem": None if spec.mem_gb is None else f"{spec.mem_gb * 1024:.0f}M",
    }
    return {key: value for key, value in values.items() if value is not None}


def _other_directives(spec: SlurmSpec, sweep: Path, tasks: list[int], dependency: str) -> dict[str, Any]:
    """Returns the directives that submitit has no parameter for, or sets otherwise."""
    number, array = len(tasks), tasks != [0]
    listed = f"0-{number - 1}" if tasks == list(range(number)) else ",".join(map(str, tasks))
    values = {
        "array": f"{listed}%{min(number, spec.array_parallelism or number)}" if array else None,
        "dependency": dependency or None,
        "kill_on_invalid_dep": "yes" if dependency else None,
        "chdir": str(Path.cwd()),
        "output": str(launch_dir(sweep) / "logs" / f"{'%A_%a' if array else '%j'}.log"),
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


def run_command(spec: SlurmSpec, sweep: Path, code: Mapping[str, str], continues: bool = False) -> str:
    """Returns the lines that start a run by srun.

    `code`: environment variables that locate the code. `continues`: a command without checkpoints, which continues.
    """
    variables = {name: value for name, value in code.items() if name != "PYTHONPATH"}
    python = spec.python or shlex.quote(sys.executable)  # as it is: a command with words of the shell
    limits = {
        "max_num_timeout": spec.max_num_timeout,
        "max_preemption": "" if spec.max_preemption is None else spec.max_preemption,
        "max_retry": spec.max_retry,
        "max_stalled": spec.max_num_timeout + 1 if continues else _MAX_STALLED,
        "stopped": int(Exit.REQUEUE),
        "mem_gb": "" if spec.mem_gb is None else f"{spec.mem_gb:g}",
        "sweep": shlex.quote(str(sweep)),
        "describes": shlex.quote(f"{'' if spec.name else 'name '}{'' if spec.comment else 'comment'}"),
        "on_end": shlex.quote(spec.on_end or ""),
    }
    lines = [
        exports({"PYTHONUNBUFFERED": "1", **variables, **spec.environment}),
        f'export PYTHONPATH={shlex.quote(code["PYTHONPATH"])}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        " ".join(f"{name}={value}" for name, value in limits.items()),
        f"pass_environment=({' '.join(spec.pass_environment)})",
        f"srun_args=({shlex.join(spec.srun_args)})",
        f"worker=({python} -u -m {snapshot.MODULE})",
        _bash("job_run"),
    ]
    return "\n".join(lines)


def _bash(part: str) -> str:
    """Returns the part of the script that is the same for all jobs."""
    return (_HERE / f"{part}.sh").read_text(encoding="utf-8")


def exports(values: Mapping[str, str]) -> str:
    """Returns one export line per variable. Values are quoted, so that the shell expands nothing in them."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
