"""Network options of a run, `hydra.launcher.network.…`, set through environment variables of NCCL, gloo and torch."""

from __future__ import annotations

import dataclasses
import re
from enum import StrEnum

from clipx.config.specs import frozen
from clipx.errors import require

_KEY = "hydra.launcher.network"
# A list of names in NCCL's syntax: ^ excludes, = matches whole names; an adapter may have a port, as mlx5_0:1.
_NAMES = re.compile(r"\^?=?[\w.:-]+(,[\w.:-]+)*")
_ONE = re.compile(r"[\w.:-]+")
_ALGORITHMS = ("ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")


class Debug(StrEnum):
    """Level of NCCL's messages in the log of each rank."""

    version = "version"
    """NCCL's version."""

    warn = "warn"
    """Also an explicit message when NCCL fails."""

    info = "info"
    """Also debug information, such as topology and chosen algorithms."""

    trace = "trace"
    """Also a trace of every call."""


class AsyncErrors(StrEnum):
    """Reaction of torch in a rank whose NCCL collective failed or timed out."""

    ignore = "0"
    """Nothing: the rank waits."""

    tear_down = "1"
    """Aborts the communicators, then ends the process."""

    clean_up = "2"
    """Aborts the communicators and does not end the process."""

    exit = "3"
    """Ends the process at once. The default of torch."""


@frozen
class NetworkSpec:
    """Network options of the processes. null means the default of NCCL, gloo or torch. A run on the CPU uses gloo alone
    and refuses all keys except `interface` and `gloo_interface`."""

    interface: str | None = None
    """Network interfaces of sockets (NCCL_SOCKET_IFNAME), such as ib0 or eth0,eth1. Names are prefixes; = before the
    list matches whole names, ^ excludes them (^docker0). A single name is passed to gloo too. null: NCCL's choice."""

    gloo_interface: str | None = None
    """Network interface of gloo (GLOO_SOCKET_IFNAME), one whole name as `ip link` prints it. null: `interface`, if that
    is a single name, else gloo's choice."""

    ib: bool | None = None
    """Use of InfiniBand or RoCE (NCCL_IB_DISABLE). false: sockets only. null: NCCL's choice."""

    ib_hca: str | None = None
    """InfiniBand adapters (NCCL_IB_HCA), such as mlx5, =mlx5_0:1,mlx5_1:1 or ^mlx5_3: prefixes, with = whole names and
    ports, with ^ excluded. Not with `ib=false`. null: NCCL's choice."""

    p2p: bool | None = None
    """Direct transfers from GPU to GPU (NCCL_P2P_DISABLE). false: none. null: NCCL's choice."""

    algo: list[str] | None = None
    """Algorithms that NCCL may choose (NCCL_ALGO): some of ring, tree, collnetdirect, collnetchain, nvls, nvlstree,
    pat. null: NCCL chooses, usually better. For debugging and comparisons."""

    proto: list[str] | None = None
    """Protocols that NCCL may choose (NCCL_PROTO): some of ll, ll128, simple. null: NCCL chooses. For debugging and
    comparisons."""

    debug: Debug | None = None
    """Level of NCCL's messages in the log of each rank (NCCL_DEBUG): version, warn, info or trace. null: NCCL's
    default."""

    async_errors: AsyncErrors | None = None
    """Reaction of a rank whose NCCL collective failed or timed out (TORCH_NCCL_ASYNC_ERROR_HANDLING). ignore: it waits.
    tear_down: it aborts the communicators and exits. clean_up: it aborts them and does not exit. exit: it exits at
    once, torch's default. null: torch's default."""

    flight_recorder: int | None = None
    """Number of last collectives that torch records (TORCH_FR_BUFFER_SIZE) and writes to TORCH_FR_DUMP_TEMP_FILE when
    one times out (TORCH_FR_DUMP_ON_TIMEOUT). At least 1; 2000 covers some steps. null: torch's default."""

    def __post_init__(self) -> None:
        for key in ("interface", "ib_hca"):
            names = getattr(self, key)
            require(
                names is None or _NAMES.fullmatch(names) is not None,
                f"{_KEY}.{key}={names} is not a list of names: write a,b or, to exclude them, ^a,b, or null",
            )
        name = self.gloo_interface
        require(
            name is None or _ONE.fullmatch(name) is not None,
            f"{_KEY}.gloo_interface={name} is not one name: give one that `ip link` prints, or null",
        )
        for key, known in (("algo", _ALGORITHMS), ("proto", _PROTOCOLS)):
            words = getattr(self, key)
            require(words != [], f"{_KEY}.{key}=[] leaves NCCL no choice: give some of {', '.join(known)}, or null")
            for word in words or ():
                require(
                    word.lower() in known, f"{_KEY}.{key}={word} is not known to NCCL: choose from {', '.join(known)}"
                )
        require(
            self.ib is not False or self.ib_hca is None,
            f"{_KEY}.ib_hca={self.ib_hca} has no effect with {_KEY}.ib=false: remove one of them",
        )
        require(
            self.flight_recorder is None or self.flight_recorder >= 1,
            f"{_KEY}.flight_recorder={self.flight_recorder} must be at least 1, or null: 2000 covers some steps",
        )

    def check(self, device: str) -> None:
        """Raises ConfigError if an option that is set has no effect on the run's device."""
        set_keys = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        nccl_keys = [key for key in set_keys if key not in ("gloo_interface", "interface")]
        require(
            device != "cpu" or not nccl_keys,
            f"{_KEY}.{next(iter(nccl_keys), '')} is for NCCL and has no effect on the CPU: remove it, or use GPUs",
        )

    def variables(self) -> dict[str, str]:
        """Environment variables that set these options."""
        values = {name: _text(getattr(self, key)) for name, key in VARIABLES.items()}
        if self.gloo_interface is None and self.interface and _ONE.fullmatch(self.interface.removeprefix("=")):
            values["GLOO_SOCKET_IFNAME"] = self.interface.removeprefix("=")
        if self.flight_recorder:
            values["TORCH_FR_DUMP_ON_TIMEOUT"] = "1"
        return {name: value for name, value in values.items() if value is not None}


VARIABLES = {
    "NCCL_SOCKET_IFNAME": "interface",
    "GLOO_SOCKET_IFNAME": "gloo_interface",
    "NCCL_IB_DISABLE": "ib",
    "NCCL_IB_HCA": "ib_hca",
    "NCCL_P2P_DISABLE": "p2p",
    "NCCL_ALGO": "algo",
    "NCCL_PROTO": "proto",
    "NCCL_DEBUG": "debug",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "async_errors",
    "TORCH_FR_BUFFER_SIZE": "flight_recorder",
    "TORCH_FR_DUMP_ON_TIMEOUT": "flight_recorder",
}
"""Key of each environment variable. `hydra.launcher.environment` refuses these variables."""


def _text(value: bool | int | str | list[str] | None) -> str | None:
    """Formats a value for its variable. A bool is inverted, for the variables disable something."""
    if value is None or isinstance(value, bool):
        return None if value is None else str(int(not value))
    if isinstance(value, list):
        return ",".join(value)
    return value.upper() if isinstance(value, Debug) else str(value)
