"""Options of the launcher `hydra/launcher=clipx_torchrun`."""

from __future__ import annotations

import re

from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx_launch.options import LaunchSpec


@register("launcher")
@frozen
class TorchrunSpec(LaunchSpec):
    """`hydra/launcher=clipx_torchrun`: prints the torchrun script of one run, to start on each host without SLURM."""

    kind: str = "torchrun"
    """Name of this launcher in the registry. Choose a launcher by `hydra/launcher=…`, not by this key."""

    _target_: str = "hydra_plugins.clipx_plugins.TorchrunLauncher"
    """Class of the launcher, which Hydra instantiates. Do not change it."""

    nodes: int = 1
    """Number of hosts. At least 1. More than 1 needs `host`."""

    tasks_per_node: int = 1
    """Number of ranks on each host. At least 1. Each rank uses one GPU if the run uses GPUs."""

    host: str = "localhost"
    """Name or address of the first host, as all hosts resolve it (torchrun --master-addr). localhost is for one
    host."""

    port: int = 29500
    """TCP port on `host` where the ranks meet (torchrun --master-port), from 1 to 65535."""

    def __post_init__(self) -> None:
        LaunchSpec.__post_init__(self)
        for key in ("nodes", "tasks_per_node"):
            require(getattr(self, key) >= 1, f"hydra.launcher.{key}={getattr(self, key)} must be at least 1")
        require(
            self.nodes == 1 or self.host != "localhost",
            f"hydra.launcher.nodes={self.nodes} needs the name of the first host: set hydra.launcher.host",
        )
        require(
            re.fullmatch(r"[\w.:-]+", self.host) is not None,
            f"hydra.launcher.host={self.host} is not a host name or an address: give one of the first host",
        )
        require(0 < self.port < 2**16, f"hydra.launcher.port={self.port} is not a port: give one from 1 to 65535")

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node
