"""Options of the SLURM launcher, `hydra/launcher=clipx_slurm`."""

from __future__ import annotations

import re
from dataclasses import field
from enum import StrEnum
from typing import Any

from clipx.config.registry import frozen, register
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require
from clipx_launch.options import LaunchSpec

_HOURS = re.compile(r"(\d+)(m|h|d)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
# Options of sbatch that have an option here, or that the launcher sets itself (empty value).
_SBATCH = {
    "job-name": "name", "time": "time", "nodes": "nodes", "ntasks-per-node": "tasks_per_node", "mem": "mem_gb",
    "gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_task", "partition": "partition", "account": "account",
    "qos": "qos", "constraint": "constraint", "signal": "signal_before_s",
    **dict.fromkeys(("array", "chdir", "dependency", "error", "open-mode", "output", "requeue", "no-requeue"), ""),
}  # fmt: skip


class LaunchStyle(StrEnum):
    """Program that starts the ranks of a job."""

    srun = "srun"
    """srun starts one task for each rank."""

    torchrun = "torchrun"
    """srun starts one task for each node, in which torchrun starts the ranks. For sites that require torchrun."""


@register("launcher")
@frozen
class SlurmSpec(LaunchSpec):
    """`hydra/launcher=clipx_slurm`: submits a sweep as SLURM job arrays, and a single point as one job."""

    kind: str = "slurm"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    _target_: str = "hydra_plugins.clipx_plugins.SlurmLauncher"
    """Class of the launcher, which Hydra instantiates. Do not change it."""

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

    nodes: int = 1
    """Number of nodes of a point. At least 1."""

    tasks_per_node: int = 1
    """Number of ranks on each node. At least 1."""

    gpus_per_node: int = 1
    """Number of GPUs of each node: equal to `tasks_per_node`, one for each rank, or 0 to run on the CPU."""

    cpus_per_task: int = 8
    """Number of CPU cores of each rank. At least 1."""

    mem_gb: float | None = None
    """Memory of each node in GB of 1024 MB (sbatch --mem). Above 0. null: the default of the site."""

    time: str = "24h"
    """Time limit of a job, above 0 and rounded up to minutes: 90m, 24h, 2d, or in quotes '24:00:00' or '1-12:00:00'."""

    parallelism: int | None = None
    """Largest number of points of the sweep that run at the same time. At least 1. null: no limit."""

    setup: list[str] = field(default_factory=list)
    """Shell lines of the job's script before the run, such as `module load cuda/12.8` or the activation of conda."""

    srun: list[str] = field(default_factory=list)
    """Further options of srun, such as `--container-image=IMAGE`."""

    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch: {reservation: mine, exclusive: true}. Options that have a key here, or that the
    launcher sets, are refused. true gives an option without a value, false and null drop it."""

    snapshot: bool = True
    """Copies the code into the sweep's folder, so that later edits do not reach points that wait or are requeued.
    false: the points run the code as it is when they start."""

    style: LaunchStyle = LaunchStyle.srun
    """Program that starts the ranks: `srun`, one task for each rank, or `torchrun`, one task for each node."""

    signal_before_s: int = 120
    """Seconds before the time limit at which SLURM sends SIGUSR1: the run saves and is requeued. 0 or more, below
    `time`. 0 sends no signal. Raise it if saving takes longer."""

    max_requeue: int = 20
    """Largest number of times that a job is requeued. 0 or more. A job that was requeued three times without a newer
    checkpoint fails."""

    max_retry: int = 0
    """Largest number of times that a job is requeued after a rank was killed or lost, or ended by the watchdog. 0 or
    more. The node of a killed or lost rank is excluded."""

    wait: bool = False
    """Waits until all points have ended. Sweepers that need results, that is all except Hydra's BasicSweeper, require
    true."""

    dry_run: bool = False
    """Prints the job's script and writes or submits nothing."""

    submit: bool = True
    """Submits the jobs. false: writes the folders of the points and prints the script, to be given to `sbatch`. false
    excludes `wait` and `dry_run`."""

    def __post_init__(self) -> None:
        LaunchSpec.__post_init__(self)
        for key in ("nodes", "tasks_per_node", "cpus_per_task", "parallelism"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"hydra.launcher.{key}={value} must be at least 1")
        for key in ("max_requeue", "max_retry", "signal_before_s"):
            require(getattr(self, key) >= 0, f"hydra.launcher.{key}={getattr(self, key)} must be 0 or more")
        require(
            self.gpus_per_node in (0, self.tasks_per_node),
            f"hydra.launcher.gpus_per_node={self.gpus_per_node} must be hydra.launcher.tasks_per_node="
            f"{self.tasks_per_node}, one for each rank: set the same number, or 0 for the CPU",
        )
        require(self.mem_gb is None or self.mem_gb > 0, f"hydra.launcher.mem_gb={self.mem_gb} must be above 0, or null")
        require(
            self.signal_before_s < 60 * self.minutes,
            f"hydra.launcher.signal_before_s={self.signal_before_s} must be below hydra.launcher.time={self.time}: "
            "lower it, or raise the time limit",
        )
        for key, value in self.sbatch.items():
            option_key = _SBATCH.get(key.replace("_", "-"))
            fix = f"set hydra.launcher.{option_key}" if option_key else "remove it"
            require(option_key is None, f"hydra.launcher.sbatch.{key}={value} is set by the launcher: {fix}")
        for key in ("wait", "dry_run"):
            require(
                self.submit or not getattr(self, key),
                f"hydra.launcher.{key}=true has no effect with hydra.launcher.submit=false: remove one of them",
            )

    @property
    def minutes(self) -> int:
        """Time limit in minutes, rounded up."""
        if found := _HOURS.fullmatch(self.time):
            minutes = int(found[1]) * {"m": 1, "h": 60, "d": 1440}[found[2]]
        elif found := _CLOCK.fullmatch(self.time):
            days, hours, minutes_, seconds = (int(part or 0) for part in found.groups())
            minutes = 1440 * days + 60 * hours + minutes_ + (seconds > 0)
        else:
            minutes = -1  # YAML parses 24:00:00 without quotes as a number
        require(
            minutes != -1,
            f"hydra.launcher.time={self.time} is not a time with a unit: write 90m, 24h or 2d, or in quotes '24:00:00'",
        )
        require(minutes > 0, f"hydra.launcher.time={self.time} must be above 0")
        return minutes

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node

    def check(self, distributed: DistributedSpec) -> None:
        gpus = f"hydra.launcher.gpus_per_node={self.gpus_per_node}"
        gpus_by_sbatch = any(word in key for key in self.sbatch for word in ("gpu", "gres"))
        cpu = distributed.device == "cpu"
        require(
            not (cpu and self.gpus_per_node),
            f"distributed.device=cpu leaves the GPUs of {gpus} idle: add hydra.launcher.gpus_per_node=0",
        )
        require(
            not (distributed.device == "cuda" and self.gpus_per_node == 0 and not gpus_by_sbatch),
            f"distributed.device=cuda needs GPUs, but {gpus}: raise it, or use distributed=cpu",
        )
        self.network.check("cpu" if cpu or not (self.gpus_per_node or gpus_by_sbatch) else distributed.device)
