"""How the ranks of a run reach each other: `hydra.launcher.network.…`, in the words of NCCL's and gloo's variables."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum

from clipx.errors import require

_KEY = "hydra.launcher.network"
# A list of names as NCCL reads it: ^ leaves out, = takes whole names; of an adapter also a port.
_NAMES = re.compile(r"\^?=?[\w.:-]+(,[\w.:-]+)*")
_ONE = re.compile(r"[\w.:-]+")
_ALGORITHMS = ("ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")


class Debug(StrEnum):
    """How much NCCL tells, in each rank's log."""

    version = "version"
    warn = "warn"
    info = "info"
    trace = "trace"


class AsyncErrors(StrEnum):
    """What torch does in a rank whose collective failed or timed out on NCCL."""

    ignore = "0"  # nothing: it waits
    tear_down = "1"  # gives up the communicators, then ends the process
    clean_up = "2"  # gives them up, and does not end it
    exit = "3"  # ends the process at once: torch's own choice


@dataclass(kw_only=True, slots=True)
class NetworkSpec:
    """What is left null is NCCL's, gloo's or torch's own choice. On the CPU gloo's interface alone counts."""

    interface: str | None = None  # NCCL_SOCKET_IFNAME: of sockets, as ib0 or eth0,eth1; a prefix, or with = the whole
    gloo_interface: str | None = None  # GLOO_SOCKET_IFNAME, one whole name; null: `interface` where that is one
    ib: bool | None = None  # NCCL_IB_DISABLE: false keeps to sockets
    ib_hca: str | None = None  # NCCL_IB_HCA: the adapters, as mlx5 or =mlx5_0:1,mlx5_1:1
    p2p: bool | None = None  # NCCL_P2P_DISABLE: false moves nothing from GPU to GPU directly
    algo: list[str] | None = None  # NCCL_ALGO: those that NCCL may choose, [ring,tree]
    proto: list[str] | None = None  # NCCL_PROTO: [ll,ll128,simple]
    debug: Debug | None = None  # NCCL_DEBUG
    async_errors: AsyncErrors | None = None  # TORCH_NCCL_ASYNC_ERROR_HANDLING
    # TORCH_FR_BUFFER_SIZE, and TORCH_FR_DUMP_ON_TIMEOUT: so many last collectives are kept, and written to
    # TORCH_FR_DUMP_TEMP_FILE when one times out
    flight_recorder: int | None = None

    def __post_init__(self) -> None:
        for key in ("interface", "ib_hca"):
            names = getattr(self, key)
            require(
                names is None or _NAMES.fullmatch(names) is not None,
                f"{_KEY}.{key}={names} is no list of names: write a,b with ^ before it to leave those out, or null",
            )
        one = self.gloo_interface
        require(
            one is None or _ONE.fullmatch(one) is not None,
            f"{_KEY}.gloo_interface={one} is not one name: give one as `ip link` shows it, or null",
        )
        for key, known in (("algo", _ALGORITHMS), ("proto", _PROTOCOLS)):
            words = getattr(self, key)
            require(words != [], f"{_KEY}.{key}=[] leaves NCCL none: name some of {', '.join(known)}, or null")
            for word in words or ():
                require(
                    word.lower() in known, f"{_KEY}.{key}={word} is not known to NCCL: choose from {', '.join(known)}"
                )
        require(
            self.ib is not False or self.ib_hca is None,
            f"{_KEY}.ib_hca={self.ib_hca} has no effect with {_KEY}.ib=false: leave one of them out",
        )
        require(
            self.flight_recorder is None or self.flight_recorder >= 1,
            f"{_KEY}.flight_recorder={self.flight_recorder} must be at least 1, or null: 2000 covers some steps",
        )

    def check(self, device: str) -> None:
        """Raises ConfigError where what is set has no effect on the run's device."""
        set_keys = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        nccl_keys = [key for key in set_keys if key not in ("gloo_interface", "interface")]
        require(
            device != "cpu" or not nccl_keys,
            f"{_KEY}.{next(iter(nccl_keys), '')} is NCCL's and has no effect on the CPU: leave it out, or use GPUs",
        )

    def variables(self) -> dict[str, str]:
        """The environment that says all this."""
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
"""Which key says each. `hydra.launcher.environment` may not."""


def _text(value: bool | int | str | list[str] | None) -> str | None:
    """As the variables have it: those of flags say what is turned off."""
    if value is None or isinstance(value, bool):
        return None if value is None else str(int(not value))
    if isinstance(value, list):
        return ",".join(value)
    return value.upper() if isinstance(value, Debug) else str(value)
