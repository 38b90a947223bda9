"""Options of the launchers, `hydra.launcher.…`. Put the values of a site into a YAML file of that site."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.config.registry import MISSING, declare, frozen, register
from clipx.distributed.spec import DistributedSpec
from clipx.errors import require
from clipx_launch.network import VARIABLES, NetworkSpec

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from clipx_launch.sweep import Sweep

declare("launcher", "clipx_launch.slurm_spec", "slurm")
declare("launcher", "clipx_launch.torchrun_spec", "torchrun")
declare("sweeper", "clipx_launch.search.spec", "optuna")

_NAME = re.compile(r"[A-Za-z_]\w*")


@frozen
class LaunchSpec:
    """Options that all launchers share."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. Values are taken literally: the shell expands nothing in them. Variables
    that have an option in `hydra.launcher.network` are refused here."""

    network: NetworkSpec = field(default_factory=NetworkSpec)
    """Network options of NCCL, gloo and torch."""

    kind: str = MISSING
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    _target_: str = "hydra_plugins.clipx_plugins.SpecLauncher"
    """Class of the launcher, which Hydra instantiates. Do not change it."""

    python: str | None = None
    """Python command of the points' processes, such as `apptainer exec --nv clipx.sif python` with clipx_slurm.
    null: the interpreter that launches."""

    def __post_init__(self) -> None:
        for name in self.environment:
            require(
                _NAME.fullmatch(name) is not None,
                f"hydra.launcher.environment.{name} is not a variable name: use letters, digits and _",
            )
            require(
                name not in VARIABLES,
                f"hydra.launcher.environment.{name} has an option: set hydra.launcher.network.{VARIABLES.get(name)}",
            )
        require(self.python != "", "hydra.launcher.python= is empty: give an interpreter, or null")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of every process: those of `network`, and `environment`."""
        return {**self.network.variables(), **self.environment}

    @property
    def world(self) -> int:
        """Number of ranks of a point."""
        raise NotImplementedError

    def launch(self, sweep: Sweep) -> Sequence[JobReturn]:
        """Launches the points of a composed sweep. Returns Hydra's result of each. Launchers of plug-ins implement it.

        Raises ClipxError.
        """
        raise NotImplementedError

    def command(self, folder: Path) -> list[str]:
        """Returns the words of a command that runs one process of the point in `folder`, with its variables."""
        from clipx_launch import snapshot

        variables = {**snapshot.environment(None), **self.variables}
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
        self.network.check(distributed.device)


@register("launcher")
@frozen
class LocalSpec(LaunchSpec):
    """`hydra/launcher=clipx_local`: runs a sweep in processes on this machine, and waits for it. The default."""

    kind: str = "local"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    _target_: str = "hydra_plugins.clipx_plugins.LocalLauncher"
    """Class of the launcher, which Hydra instantiates. Do not change it."""

    parallelism: int = 1
    """Number of points that run at the same time. At least 1; with 1 the command also prints the output of rank 0. On
    GPUs, `parallelism` times `tasks` is at most the number of visible GPUs."""

    tasks: int = 1
    """Number of ranks of a point. At least 1. Each rank gets a GPU that no other rank uses, if the machine has GPUs and
    the run uses them."""

    snapshot: bool = True
    """Copies the code into the sweep's folder, so that later edits do not reach points that have not started.
    false: the points run the code as it is when they start."""

    def __post_init__(self) -> None:
        LaunchSpec.__post_init__(self)
        for key in ("parallelism", "tasks"):
            require(getattr(self, key) >= 1, f"hydra.launcher.{key}={getattr(self, key)} must be at least 1")

    @property
    def world(self) -> int:
        return self.tasks
