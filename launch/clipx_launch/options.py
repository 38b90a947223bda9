"""What the launchers are told: `hydra.launcher.…`. A site's own values belong in a YAML file of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from clipx.config.registry import option
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require
from clipx_launch.network import VARIABLES, NetworkSpec

_HOURS = re.compile(r"(\d+)(m|h|d)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_NAME = re.compile(r"[A-Za-z_]\w*")
# sbatch's own words for what has an option here, or is the launcher's.
_SBATCH = {
    "job-name": "name", "time": "time", "nodes": "nodes", "ntasks-per-node": "tasks_per_node", "mem": "mem_gb",
    "gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_task", "partition": "partition", "account": "account",
    "qos": "qos", "constraint": "constraint", "signal": "signal_before_s",
    **dict.fromkeys(("array", "chdir", "dependency", "error", "open-mode", "output", "requeue", "no-requeue"), ""),
}  # fmt: skip


class LaunchStyle(StrEnum):
    srun = "srun"  # one task for each rank
    torchrun = "torchrun"  # one task for each node, in which torchrun starts the ranks: for sites that demand it


@dataclass(kw_only=True, slots=True)
class LaunchSpec:
    """What the launchers share."""

    environment: dict[str, str] = field(default_factory=dict)  # of every process, taken literally
    network: NetworkSpec = field(default_factory=NetworkSpec)
    python: str | None = None  # the interpreter of the points' processes; null: the one that launches

    def __post_init__(self) -> None:
        for name in self.environment:
            require(
                _NAME.fullmatch(name) is not None,
                f"hydra.launcher.environment.{name} is no name of a variable: use letters, digits and _",
            )
            require(
                name not in VARIABLES,
                f"hydra.launcher.environment.{name} is the network's to say: set "
                f"hydra.launcher.network.{VARIABLES.get(name)}",
            )
        require(self.python != "", "hydra.launcher.python= is empty: give an interpreter, or null")

    @property
    def variables(self) -> dict[str, str]:
        """Of every process: the network's, and `environment`."""
        return {**self.network.variables(), **self.environment}

    @property
    def world(self) -> int:
        """Ranks of a point."""
        raise NotImplementedError

    def check(self, distributed: DistributedSpec) -> None:
        """Raises ConfigError where these options and a run's contradict each other."""
        self.network.check(distributed.device)


@option("launcher")
@dataclass(kw_only=True, slots=True)
class SlurmSpec(LaunchSpec):
    """`hydra/launcher=clipx_slurm`: a sweep as SLURM job arrays, a single point as one job."""

    kind: str = "slurm"
    _target_: str = "hydra_plugins.clipx_launcher.SlurmLauncher"

    name: str = "clipx"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1  # ranks
    gpus_per_node: int = 1  # one for each rank, or 0
    cpus_per_task: int = 8
    mem_gb: float | None = None  # of a node; null: the site's default
    time: str = "24h"  # 90m, 24h, 2d, or '24:00:00' and '1-12:00:00'
    parallelism: int | None = None  # points that run at a time
    setup: list[str] = field(default_factory=list)  # lines of the job's script: modules, conda
    srun: list[str] = field(default_factory=list)  # more options of srun, such as --container-image=…
    sbatch: dict[str, Any] = field(default_factory=dict)  # more options of sbatch: {reservation: mine, exclusive: true}
    snapshot: bool = True  # false: the points run the code as it is when they start, not as it is now
    style: LaunchStyle = LaunchStyle.srun
    signal_before_s: int = 120  # this long before the end of its time a run saves, and is put back into the queue
    max_requeue: int = 20  # how often at most
    wait: bool = False  # true: until all points have ended; a sweeper that needs their results demands it
    dry_run: bool = False  # prints the script, and does nothing
    submit: bool = True  # false: makes the points and prints the script, which is for `sbatch`

    def __post_init__(self) -> None:
        LaunchSpec.__post_init__(self)
        for key in ("nodes", "tasks_per_node", "cpus_per_task", "parallelism"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"hydra.launcher.{key}={value} must be at least 1")
        for key in ("max_requeue", "signal_before_s"):
            require(getattr(self, key) >= 0, f"hydra.launcher.{key}={getattr(self, key)} must be 0 or more")
        require(
            self.gpus_per_node in (0, self.tasks_per_node),
            f"hydra.launcher.gpus_per_node={self.gpus_per_node} is not one for each of "
            f"hydra.launcher.tasks_per_node={self.tasks_per_node}: give the same number, or 0 for the CPU",
        )
        require(self.mem_gb is None or self.mem_gb > 0, f"hydra.launcher.mem_gb={self.mem_gb} must be above 0, or null")
        require(
            self.signal_before_s < 60 * self.minutes,
            f"hydra.launcher.signal_before_s={self.signal_before_s} is all of hydra.launcher.time={self.time}: "
            "give less, or more time",
        )
        for key, value in self.sbatch.items():
            own = _SBATCH.get(key.replace("_", "-"))
            fix = f"set hydra.launcher.{own}" if own else "leave it out"
            require(own is None, f"hydra.launcher.sbatch.{key}={value} is the launcher's to say: {fix}")
        for key in ("wait", "dry_run"):
            require(
                self.submit or not getattr(self, key),
                f"hydra.launcher.{key}=true has no effect with hydra.launcher.submit=false: leave one of them out",
            )

    @property
    def minutes(self) -> int:
        """The time limit, rounded up."""
        if found := _HOURS.fullmatch(self.time):
            minutes = int(found[1]) * {"m": 1, "h": 60, "d": 1440}[found[2]]
        elif found := _CLOCK.fullmatch(self.time):
            days, hours, minutes_, seconds = (int(part or 0) for part in found.groups())
            minutes = 1440 * days + 60 * hours + minutes_ + (seconds > 0)
        else:
            minutes = -1  # of 24:00:00 without quotes YAML makes a number
        require(
            minutes != -1,
            f"hydra.launcher.time={self.time} is no time with a unit: write 90m, 24h or 2d, or in quotes '24:00:00'",
        )
        require(minutes > 0, f"hydra.launcher.time={self.time} must be above 0")
        return minutes

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node

    def check(self, distributed: DistributedSpec) -> None:
        gpus = f"hydra.launcher.gpus_per_node={self.gpus_per_node}"
        own = any(word in key for key in self.sbatch for word in ("gpu", "gres"))
        cpu = distributed.device == "cpu"
        require(
            not (cpu and self.gpus_per_node),
            f"distributed.device=cpu leaves the GPUs of {gpus} idle: add hydra.launcher.gpus_per_node=0",
        )
        require(
            not (distributed.device == "cuda" and self.gpus_per_node == 0 and not own),
            f"distributed.device=cuda, but {gpus}: ask for GPUs, or use distributed=cpu",
        )
        self.network.check("cpu" if cpu or not (self.gpus_per_node or own) else distributed.device)


@option("launcher")
@dataclass(kw_only=True, slots=True)
class LocalSpec(LaunchSpec):
    """`hydra/launcher=clipx_local`: a sweep in processes of this machine. The command waits for them."""

    kind: str = "local"
    _target_: str = "hydra_plugins.clipx_launcher.LocalLauncher"

    parallelism: int = 1  # points that run at a time
    tasks: int = 1  # ranks of a point, each with a GPU of its own where there are any
    snapshot: bool = True  # false: the points run the code as it is when they start, not as it is now

    def __post_init__(self) -> None:
        LaunchSpec.__post_init__(self)
        for key in ("parallelism", "tasks"):
            require(getattr(self, key) >= 1, f"hydra.launcher.{key}={getattr(self, key)} must be at least 1")

    @property
    def world(self) -> int:
        return self.tasks


@option("launcher")
@dataclass(kw_only=True, slots=True)
class TorchrunSpec(LaunchSpec):
    """`hydra/launcher=clipx_torchrun`: prints the command that starts a point on each of some hosts without SLURM."""

    kind: str = "torchrun"
    _target_: str = "hydra_plugins.clipx_launcher.TorchrunLauncher"

    nodes: int = 1
    tasks_per_node: int = 1  # ranks, each with a GPU of its own where there are any
    host: str = "localhost"  # of the first node, as all of them know it
    port: int = 29500  # there

    def __post_init__(self) -> None:
        LaunchSpec.__post_init__(self)
        for key in ("nodes", "tasks_per_node"):
            require(getattr(self, key) >= 1, f"hydra.launcher.{key}={getattr(self, key)} must be at least 1")
        require(
            self.nodes == 1 or self.host != "localhost",
            f"hydra.launcher.nodes={self.nodes} are to meet at hydra.launcher.host: name the first of them",
        )
        require(
            re.fullmatch(r"[\w.:-]+", self.host) is not None,
            f"hydra.launcher.host={self.host} is no name of a host: give one, or its address",
        )
        require(0 < self.port < 2**16, f"hydra.launcher.port={self.port} is no port: give one from 1 to 65535")

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node
