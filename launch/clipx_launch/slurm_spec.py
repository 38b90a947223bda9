"""Options of the SLURM launcher, `hydra/launcher=clipx_slurm`: all of hydra-submitit-launcher's `SlurmQueueConf`, with
its names and meanings, and those that it does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require, require_effect
from clipx_launch.options import JobsSpec, check_lines

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from clipx_launch.sweep import Sweep

KEYS = {
    "job-name": "name", "time": "timeout_min", "ntasks-per-node": "tasks_per_node", "mem": "mem_gb",
    "signal": "signal_delay_s", "dependency": "after",
    **{name.replace("_", "-"): name for name in (
        "nodes", "partition", "account", "qos", "constraint", "exclude", "comment", "gres", "gpus_per_node",
        "gpus_per_task", "cpus_per_task", "cpus_per_gpu", "mem_per_cpu", "mem_per_gpu",
    )},
    **dict.fromkeys(("array", "chdir", "error", "open-mode", "output", "requeue", "no-requeue"), ""),
}  # fmt: skip
"""Keys by the options of sbatch, which submitit's parameters are named after. Empty: the launcher sets it itself."""

_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?\d+")


def _check_sbatch(key: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        own = KEYS.get(name.replace("_", "-"))
        fix = f"set hydra.launcher.{own}" if own else "remove it"
        require(own is None, f"{key}.{name}={value} is set by the launcher: {fix}")
    check_lines(key, [f"{value}" for value in options.values()])


def _check_gpus(key: str, value: str) -> None:
    for part in value.split(","):
        require(
            _GPUS.fullmatch(part) is not None, f"{key}={value} is not a number of GPUs: write 4, or a100:4 for a type"
        )


def _count(value: str) -> int:
    """Returns the number of devices in `4`, `a100:4`, `gpu:a100:4` or `gpu`, or in several separated by commas."""
    return sum(int(last) if (last := part.rpartition(":")[2]).isdecimal() else 1 for part in value.split(","))


@register("launcher")
@frozen
class SlurmSpec(JobsSpec):
    """`hydra/launcher=clipx_slurm`: submits a sweep as SLURM job arrays, and a single point as one job."""

    kind: str = "slurm"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    nodes: int = option(1, ge=1)
    """Number of machines of a point."""

    name: str | None = None
    """Job name (sbatch --job-name). null: the name of the sweep's folder; of a running job also its point."""

    timeout_min: int = option(1440, ge=1, unit="min")
    """Time limit of a job in minutes (sbatch --time): 1440 is a day."""

    partition: str | None = None
    """Partition, or several separated by commas (sbatch --partition). null: the default partition."""

    account: str | None = None
    """Account that the job is charged to (sbatch --account). null: the default of the user."""

    qos: str | None = None
    """Quality of service (sbatch --qos). null: the default of the site."""

    constraint: str | None = None
    """Node features that the job needs, such as `h200&ib` (sbatch --constraint). null: any node."""

    exclude: str | None = None
    """Nodes that the job must not use, such as `n[3-4]` (sbatch --exclude)."""

    comment: str | None = None
    """Comment of the job (sbatch --comment). null: the folder of the sweep; of a running job that of its point."""

    after: str | None = None
    """Job that must finish before the points start, or the folder of a run or a sweep whose jobs must (sbatch
    --dependency=afterok): a job that is requeued has not finished. If it fails, the points are cancelled."""

    gpus_per_node: str | None = option(None, check=_check_gpus)
    """GPUs of each node (sbatch --gpus-per-node), one for each rank: `8`, or `a100:8` for a type. 0 runs on the CPU.
    null: `tasks_per_node`, unless `gpus_per_task` or `gres` asks for GPUs or all points have distributed.device=cpu."""

    gpus_per_task: str | None = option(None, check=_check_gpus)
    """GPUs of each rank, `1` or `a100:1` (sbatch --gpus-per-task), in place of `gpus_per_node`."""

    gres: str | None = None
    """Devices of each node (sbatch --gres), such as `gpu:a100:8`, in place of `gpus_per_node`."""

    cpus_per_task: int | None = option(None, ge=1)
    """Number of CPU cores of each rank (sbatch --cpus-per-task). null: 8, unless `cpus_per_gpu` is given."""

    cpus_per_gpu: int | None = option(None, ge=1, when="gpus_per_task")
    """Number of CPU cores of each GPU (sbatch --cpus-per-gpu), in place of `cpus_per_task`."""

    mem_gb: float | None = option(None, gt=0, unit="GB")
    """Memory of each node in GB of 1024 MB (sbatch --mem). null: the default of the site."""

    mem_per_cpu: str | None = None
    """Memory of each CPU core, such as `4G` (sbatch --mem-per-cpu), in place of `mem_gb`."""

    mem_per_gpu: str | None = None
    """Memory of each GPU, such as `100G` (sbatch --mem-per-gpu), in place of `mem_gb`."""

    array_parallelism: int | None = option(None, ge=1)
    """Largest number of points of the sweep that run at the same time. null: no limit."""

    setup: list[str] | None = option(None, check=check_lines)
    """Shell lines of the job's script before the run, such as `module load cuda/12.8` or the activation of conda."""

    srun_args: list[str] = option([], check=check_lines)
    """Further options of srun, such as `--container-image=IMAGE`."""

    additional_parameters: dict[str, Any] = option({}, check=_check_sbatch)
    """Further options of sbatch: {reservation: mine, exclusive: true}. Options that have a key here, or that the
    launcher sets, are refused. true gives an option without a value, false and null drop it."""

    signal_delay_s: int = option(120, ge=1, unit="s")
    """Seconds before the time limit at which SLURM sends SIGUSR2: the run saves and is requeued. Below the time limit.
    Raise it if saving takes longer."""

    max_num_timeout: int = option(20, ge=0)
    """Largest number of times that a job is requeued at its time limit. A job that reaches it three times without a
    newer checkpoint fails."""

    max_preemption: int | None = option(None, ge=0)
    """Largest number of times that a job is requeued after SLURM has preempted it. null: no limit."""

    max_retry: int = option(0, ge=0)
    """Largest number of times that a job is requeued after a rank was killed or lost, or ended by the watchdog. The
    node of a killed or lost rank is excluded."""

    submitit_folder: str | None = None
    """Folder of the submitted scripts; `%j` in it is the job. null: `.launch` in the sweep's folder."""

    stderr_to_stdout: bool = True
    """The log of a rank has its stdout and its stderr: true is the only value, for files of submitit_slurm."""

    wait: bool = False
    """Waits until all points have ended. Sweepers that need results, that is all except Hydra's BasicSweeper, require
    true."""

    dry_run: bool = False
    """Prints the job's script and writes or submits nothing."""

    def __post_init__(self) -> None:
        memory = ("mem_gb", "mem_per_cpu", "mem_per_gpu")
        for keys in (tuple(self.gpu_options), ("cpus_per_task", "cpus_per_gpu"), memory):
            given = [f"hydra.launcher.{key}={value}" for key in keys if (value := getattr(self, key)) is not None]
            require(len(given) <= 1, f"{' and '.join(given)} exclude each other: give one, and null for the others")
        key = next(iter(self.gpu_options), "gpus_per_node")
        require(
            self.gpus in (0, self.tasks_per_node),
            f"hydra.launcher.{key}={getattr(self, key)} must be hydra.launcher.tasks_per_node={self.tasks_per_node}, "
            "one for each rank: set the same number, or 0 for the CPU",
        )
        require(
            self.signal_delay_s < 60 * self.timeout_min,
            f"hydra.launcher.signal_delay_s={self.signal_delay_s} must be below hydra.launcher.timeout_min="
            f"{self.timeout_min}, in seconds: lower it, or raise the time limit",
        )
        merged = "the log of a rank has both its stdout and its stderr"
        require_effect(self.stderr_to_stdout, "hydra.launcher.stderr_to_stdout=false", f"because {merged}")

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node

    def of_command(self, distributed: bool) -> Self:
        if distributed:
            return replace(self, nodes=1)
        cpu = replace(self, gpus_per_node="0", gpus_per_task=None, gres=None, cpus_per_gpu=None, mem_per_gpu=None)
        return replace(cpu, nodes=1, tasks_per_node=1)

    @property
    def gpu_options(self) -> dict[str, int]:
        """Number of GPUs of each node by the keys that ask for it. Empty: `tasks_per_node`."""
        of_gres = [part for part in (self.gres or "").split(",") if part.partition(":")[0] == "gpu"]
        given = {"gpus_per_node": self.gpus_per_node, "gpus_per_task": self.gpus_per_task, "gres": ",".join(of_gres)}
        counts = {key: _count(value) for key, value in given.items() if value}
        return {key: n * self.tasks_per_node if key == "gpus_per_task" else n for key, n in counts.items()}

    @property
    def gpus(self) -> int:
        """Number of GPUs of each node."""
        return next(iter(self.gpu_options.values()), self.tasks_per_node)

    def check_sweep(self, points: int, sweeper: str) -> None:
        JobsSpec.check_sweep(self, points, sweeper)
        for key, needed in {"wait": True, "dry_run": False}.items():
            require(
                getattr(self, key) is needed or sweeper == "BasicSweeper",
                f"hydra.launcher.{key}={str(not needed).lower()} returns no results, which {sweeper} needs: set "
                f"hydra.launcher.{key}={str(needed).lower()}",
            )

    def launch(self, sweep: Sweep) -> list[JobReturn]:
        from clipx_launch import slurm

        return slurm.launch(sweep, self)

    def check(self, distributed: DistributedSpec) -> None:
        gpus = f"hydra.launcher.{next(iter(self.gpu_options), 'gpus_per_node')}={self.gpus}"
        gpus_by_sbatch = any(word in key for key in self.additional_parameters for word in ("gpu", "gres"))
        require(
            distributed.device != "cpu" or not self.gpus,
            f"distributed.device=cpu leaves the GPUs of {gpus} idle: add hydra.launcher.gpus_per_node=0",
        )
        require(
            distributed.device != "cuda" or self.gpus > 0 or gpus_by_sbatch,
            f"distributed.device=cuda needs GPUs, but {gpus}: raise it, or use distributed=cpu",
        )
