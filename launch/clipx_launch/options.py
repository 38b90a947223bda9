"""Options of the launchers, `hydra.launcher.…`. Put the values of a site into a YAML file of that site."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from clipx.config.options import option
from clipx.config.registry import MISSING, declare, frozen, register
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require, require_effect

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from clipx_launch.sweep import Sweep

declare("launcher", "clipx_launch.slurm_spec", "slurm")
declare("sweeper", "clipx_launch.search.spec", "optuna")

LAUNCHER = "hydra_plugins.clipx_plugins.ClipxLauncher"


_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_SECRET = re.compile(r"SECRET|TOKEN(?!IZER)|KEY|PASSW|CREDENTIAL", re.IGNORECASE)


def _check_variables(key: str, variables: Mapping[str, str]) -> None:
    for name in variables:
        is_name = _VARIABLE.fullmatch(name) is not None
        require(is_name, f"{key}.{name} is not a variable name: use letters, digits and _")
        require(
            _SECRET.search(name) is None,
            f"{key}.{name} would be saved in the job's script: export {name} in the shell, and give its name alone, "
            f"hydra.launcher.pass_environment=[{name}]",
        )


_ASSIGNED = re.compile(r"(\w+)=(?![\"']?[$`]|\s|$)")


def check_lines(key: str, lines: Sequence[str]) -> None:
    """Raises ConfigError for a line that assigns a literal value to a variable whose name is that of a secret."""
    for name in (name for line in lines for name in _ASSIGNED.findall(line)):
        require(
            _SECRET.search(name) is None,
            f"{key} sets {name}, which would be saved in the job's script: export it in the shell, and give its name "
            f"alone, hydra.launcher.pass_environment=[{name}], or read it in the job: {name}=$(cat FILE)",
        )


def _check_line(key: str, line: str) -> None:
    check_lines(key, [line])


def _check_then(key: str, commands: Sequence[str]) -> None:
    for text in commands:
        require(
            bool(text.split()), f'{key} has an empty command: give its name and options, such as "export format=hf"'
        )


def _check_names(key: str, names: Sequence[str]) -> None:
    for name in names:
        require(
            _VARIABLE.fullmatch(name) is not None,
            f"{key} has {name.partition('=')[0]}, which is not a variable name: give names alone, without values",
        )


@frozen
class LaunchSpec:
    """Options that all launchers share."""

    kind: str = MISSING
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    _target_: str = LAUNCHER
    """Class of the launcher, which Hydra instantiates. Do not change it."""

    environment: dict[str, str] = option({}, check=_check_variables)
    """Environment variables of every process, such as those of NCCL: {NCCL_SOCKET_IFNAME: ib0}. Values are taken
    literally: the shell expands nothing in them."""

    pass_environment: list[str] = option([], check=_check_names)
    """Names of environment variables of this process that the points need, such as secrets: [AWS_SECRET_ACCESS_KEY].
    Their values are written nowhere. One that is not set is an error."""

    python: str | None = None
    """Python command of the points' processes, such as `apptainer exec --nv clipx.sif python` with clipx_slurm.
    null: the interpreter that launches."""

    @property
    def world(self) -> int:
        """Number of ranks of a point."""
        raise NotImplementedError

    def launch(self, sweep: Sweep) -> Sequence[JobReturn]:
        """Launches the points of a composed sweep. Returns Hydra's result of each. Raises ClipxError."""
        raise NotImplementedError

    def check_sweep(self, points: int, sweeper: str) -> None:
        """Raises ConfigError if this launcher cannot launch so many points, or return results to a sweeper class."""

    def check_environment(self) -> None:
        """Raises ConfigError if a variable that the points need is not set."""
        for name in self.pass_environment:
            require(
                name in os.environ,
                f"hydra.launcher.pass_environment has {name}, which is not set: export it in this shell, or remove it",
            )

    def command(self, folder: Path) -> list[str]:
        """Returns the words of a command that runs one process of the point in `folder`, with its variables."""
        from clipx_launch import snapshot

        variables = {**snapshot.environment(None), **self.environment}
        python = shlex.split(self.python) if self.python else [sys.executable]
        return [
            "env",
            *(f"{key}={value}" for key, value in variables.items()),
            *python,
            "-m",
            snapshot.MODULE,
            str(folder),
        ]

    def check(self, distributed: DistributedSpec) -> None:
        """Raises ConfigError if these options contradict the options of a run."""


@frozen
class TasksSpec(LaunchSpec):
    """Options of the launchers that start several ranks on a machine."""

    tasks_per_node: int = option(1, ge=1)
    """Number of ranks of a point on each machine. Each gets a GPU that no other rank uses, if the run uses GPUs."""

    @property
    def world(self) -> int:
        return self.tasks_per_node


@frozen
class JobsSpec(TasksSpec):
    """Options of the launchers that start the points themselves."""

    then: list[str] = option([], check=_check_then)
    """Commands that follow each run, one after the other, each after the one before it has finished:
    `[evaluate, "export format=hf"]`. They have `run` of this run and the folder RUN/COMMAND. On one machine."""

    on_end: str | None = option(None, check=_check_line)
    """Shell command that runs when a point has ended and is not requeued, for at most 60 s, such as one that sends a
    message: CLIPX_STATE (finished, pruned, failed or stopped), CLIPX_REASON and CLIPX_FOLDER are in its environment."""

    def of_command(self, distributed: bool) -> Self:
        """Returns the options for a command that follows a run. `distributed`: it may have several ranks."""
        return self if distributed else replace(self, tasks_per_node=1)

    def check_sweep(self, points: int, sweeper: str) -> None:
        no_search = sweeper == "BasicSweeper"
        require_effect(no_search or not self.then, f"hydra.launcher.then=[{', '.join(self.then)}]", f"with {sweeper}")


@register("launcher")
@frozen
class LocalSpec(JobsSpec):
    """`hydra/launcher=clipx_local`: runs a sweep in processes on this machine, and waits for it. The default."""

    kind: str = "local"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    parallelism: int = option(1, ge=1)
    """Number of points that run at the same time; with 1 the command also prints the output of rank 0. On GPUs,
    `parallelism` times `tasks_per_node` is at most the number of visible GPUs."""

    def launch(self, sweep: Sweep) -> list[JobReturn]:
        from clipx_launch import local

        return local.launch(sweep, self)


@register("launcher")
@frozen
class TorchrunSpec(TasksSpec):
    """`hydra/launcher=clipx_torchrun`: prints the torchrun script of one run, to start on each host without SLURM."""

    kind: str = "torchrun"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    nodes: int = option(1, ge=1)
    """Number of machines of a point."""

    host: str = "localhost"
    """Name or address of the first host, as all hosts resolve it (torchrun --master-addr). localhost is for one
    host."""

    port: int = option(29500, ge=1, le=65535)
    """TCP port on `host` where the ranks meet (torchrun --master-port)."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[\w.:-]+", self.host) is not None and (self.nodes == 1 or self.host != "localhost"),
            f"hydra.launcher.host={self.host} is not a name of the first of hydra.launcher.nodes={self.nodes}: give "
            "the name or address by which all hosts reach it",
        )

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node

    def check_sweep(self, points: int, sweeper: str) -> None:
        require(
            points == 1,
            f"hydra/launcher=clipx_torchrun prints the script of one run, not of {points}: give one value for each "
            "key, or use clipx_slurm",
        )

    def launch(self, sweep: Sweep) -> list[JobReturn]:
        from clipx_launch import torchrun

        return torchrun.launch(sweep, self)
