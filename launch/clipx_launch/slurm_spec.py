"""Options of the SLURM launcher, `hydra/launcher=clipx_slurm`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require
from clipx_launch.options import NodesSpec, check_lines

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from clipx_launch.sweep import Sweep

_HOURS = re.compile(r"(\d+)(m|h|d)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
# Options of sbatch that have an option here, or that the launcher sets itself (empty value).
_SBATCH = {
    "job-name": "name", "time": "time", "nodes": "nodes", "ntasks-per-node": "tasks_per_node", "mem": "mem_gb",
    "gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_task", "partition": "partition", "account": "account",
    "qos": "qos", "constraint": "constraint", "signal": "signal_before_s",
    **dict.fromkeys(("array", "chdir", "dependency", "error", "open-mode", "output", "requeue", "no-requeue"), ""),
}  # fmt: skip


def _check_sbatch(key: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        own = _SBATCH.get(name.replace("_", "-"))
        fix = f"set hydra.launcher.{own}" if own else "remove it"
        require(own is None, f"{key}.{name}={value} is set by the launcher: {fix}")
    check_lines(key, [f"{value}" for value in options.values()])


def minutes_of(key: str, time: str) -> int:
    """Returns a time limit in minutes, rounded up. Raises ConfigError."""
    minutes = 0  # YAML parses 24:00:00 without quotes as a number
    if found := _HOURS.fullmatch(time):
        minutes = int(found[1]) * {"m": 1, "h": 60, "d": 1440}[found[2]]
    elif found := _CLOCK.fullmatch(time):
        days, hours, minutes_, seconds = (int(part or 0) for part in found.groups())
        minutes = 1440 * days + 60 * hours + minutes_ + (seconds > 0)
    require(
        minutes > 0, f"{key}={time} is not a time above 0 with a unit: write 90m, 24h or 2d, or in quotes '24:00:00'"
    )
    return minutes


@register("launcher")
@frozen
class SlurmSpec(NodesSpec):
    """`hydra/launcher=clipx_slurm`: submits a sweep as SLURM job arrays, and a single point as one job."""

    kind: str = "slurm"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    name: str = "clipx"
    """Job name (sbatch --job-name)."""

    partition: str | None = None
    """Partition, or several separated by commas (sbatch --partition). null: the default partition."""

    account: str | None = None
    """Account that the job is charged to (sbatch --account). null: the default of the user."""

    qos: str | None = None
    """Quality of service (sbatch --qos). null: the default of the site."""

    constraint: str | None = None
    """Node features that the job needs, such as `h200&ib` (sbatch --constraint). null: any node."""

    gpus_per_node: int = 1
    """Number of GPUs of each node: equal to `tasks_per_node`, one for each rank, or 0 to run on the CPU."""

    cpus_per_task: int = option(8, ge=1)
    """Number of CPU cores of each rank."""

    mem_gb: float | None = option(None, gt=0, unit="GB")
    """Memory of each node in GB of 1024 MB (sbatch --mem). null: the default of the site."""

    time: str = option("24h", check=minutes_of)
    """Time limit of a job, rounded up to minutes: 90m, 24h, 2d, or in quotes '24:00:00' or '1-12:00:00'."""

    parallelism: int | None = option(None, ge=1)
    """Largest number of points of the sweep that run at the same time. null: no limit."""

    setup: list[str] = option([], check=check_lines)
    """Shell lines of the job's script before the run, such as `module load cuda/12.8` or the activation of conda."""

    srun: list[str] = option([], check=check_lines)
    """Further options of srun, such as `--container-image=IMAGE`."""

    sbatch: dict[str, Any] = option({}, check=_check_sbatch)
    """Further options of sbatch: {reservation: mine, exclusive: true}. Options that have a key here, or that the
    launcher sets, are refused. true gives an option without a value, false and null drop it."""

    signal_before_s: int = option(120, ge=0, unit="s")
    """Seconds before the time limit at which SLURM sends SIGUSR1: the run saves and is requeued. Below `time`. 0 sends
    no signal. Raise it if saving takes longer."""

    max_requeue: int = option(20, ge=0)
    """Largest number of times that a job is requeued at its time limit. A job that reaches it three times without a
    newer checkpoint fails."""

    max_preemption: int | None = option(None, ge=0)
    """Largest number of times that a job is requeued after SLURM has preempted it. null: no limit."""

    max_retry: int = option(0, ge=0)
    """Largest number of times that a job is requeued after a rank was killed or lost, or ended by the watchdog. The
    node of a killed or lost rank is excluded."""

    wait: bool = False
    """Waits until all points have ended. Sweepers that need results, that is all except Hydra's BasicSweeper, require
    true."""

    dry_run: bool = False
    """Prints the job's script and writes or submits nothing."""

    def __post_init__(self) -> None:
        require(
            self.gpus_per_node in (0, self.tasks_per_node),
            f"hydra.launcher.gpus_per_node={self.gpus_per_node} must be hydra.launcher.tasks_per_node="
            f"{self.tasks_per_node}, one for each rank: set the same number, or 0 for the CPU",
        )
        require(
            self.signal_before_s < 60 * self.minutes,
            f"hydra.launcher.signal_before_s={self.signal_before_s} must be below hydra.launcher.time={self.time}: "
            "lower it, or raise the time limit",
        )

    @property
    def minutes(self) -> int:
        """Time limit in minutes, rounded up."""
        return minutes_of("hydra.launcher.time", self.time)

    def check_sweep(self, points: int, sweeper: str) -> None:
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
        gpus = f"hydra.launcher.gpus_per_node={self.gpus_per_node}"
        gpus_by_sbatch = any(word in key for key in self.sbatch for word in ("gpu", "gres"))
        require(
            distributed.device != "cpu" or not self.gpus_per_node,
            f"distributed.device=cpu leaves the GPUs of {gpus} idle: add hydra.launcher.gpus_per_node=0",
        )
        require(
            distributed.device != "cuda" or self.gpus_per_node > 0 or gpus_by_sbatch,
            f"distributed.device=cuda needs GPUs, but {gpus}: raise it, or use distributed=cpu",
        )
