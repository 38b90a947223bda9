"""Options of the distributed group: device, backend, time limits. `build` joins the process group.

launch_env.py reads rank and world size, rendezvous.py waits for the other ranks; ddp.py and fsdp.py are the options.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import dist, torch
from clipx.config.registry import MISSING
from clipx.distributed.comm import Comm
from clipx.distributed.consistency import code_version
from clipx.distributed.launch_env import LaunchEnv, cores, node_name, read_launch_env
from clipx.errors import ConfigError, PeerLost, require

if TYPE_CHECKING:
    from clipx.model.clip import CLIP


_DAY_S = 86_400.0
# What torch.accelerator has, in torch itself or by a package of the vendor's.
_DEVICES = ("auto", "cpu", "cuda", "xpu", "hpu", "npu", "mps", "mtia", "mlu", "musa")
_BACKEND = re.compile(r"\w+|\w+:\w+(,\w+:\w+)*")


@dataclass(kw_only=True, slots=True)
class DistributedSpec:
    """Process group and device. The same under plain python, torchrun, srun, submitit and MPI."""

    kind: str = MISSING
    device: str = "auto"  # auto (an accelerator where there is one), cpu, or an accelerator: cuda, xpu, hpu, npu, …
    backend: str = "auto"  # auto (torch's own for the device: nccl on cuda, gloo on cpu) or torch.distributed's name
    rendezvous_s: float = 300.0  # that ranks wait for each other at the start, from the first to the last
    timeout_s: float = 600.0  # a collective in which a rank does not answer for this long is an error
    # No step, nor progress of an evaluation or a checkpoint, for this long ends the process with its stacks; 0: never.
    # Longer than timeout_s, so that the ranks that wait for another can name it first.
    watchdog_s: float = 1800.0
    # Of torch's on the CPU, in each rank. null: OMP_NUM_THREADS where it is set (torchrun sets 1), else ranks that may
    # use the same cores share them.
    threads: int | None = None
    # BatchNorm normalises by the statistics of all ranks' micro-batches together instead of each rank's own.
    sync_batchnorm: bool = False
    shards_parameters: ClassVar[bool] = False
    """Whether a rank holds only a part of each parameter, and of the optimizer's state."""

    def __post_init__(self) -> None:
        require(
            self.device in _DEVICES,
            f"distributed.device={self.device} is not a device: choose from {', '.join(_DEVICES)}",
        )
        require(
            _BACKEND.fullmatch(self.backend) is not None,
            f"distributed.backend={self.backend} is not a backend: give auto, or a name as nccl or cpu:gloo,cuda:nccl",
        )
        for name, default in (("rendezvous_s", 300), ("timeout_s", 600)):
            seconds = getattr(self, name)
            require(
                0 < seconds <= _DAY_S,
                f"distributed.{name}={seconds} must be above 0 s and at most a day: the default is {default}",
            )
        require(self.watchdog_s >= 0, f"distributed.watchdog_s={self.watchdog_s} must be 0 s or more: 0 turns it off")
        require(
            self.threads is None or self.threads >= 1,
            f"distributed.threads={self.threads} must be at least 1: null shares the cores among the ranks of a host",
        )

    def check_micro_batches(self, micro_batches: int) -> None:
        """Raises ConfigError where they do not go with this way of spreading the model."""

    def check_optimizer(self, kind: str, shardable: bool) -> None:
        """Raises ConfigError where parameters are sharded and the optimizer is not `shardable`."""

    def prepare(self, model: CLIP, comm: Comm) -> None:
        """Changes the model in place, before its parameters are given to an optimizer. Raises ConfigError."""
        if self.sync_batchnorm:
            from clipx.distributed.batchnorm import synchronize

            synchronize(model, comm)

    def wrap(self, model: CLIP, comm: Comm) -> torch.nn.Module:
        """What is called in the model's place in training. Collective."""
        return model

    def build(self) -> Comm:
        """Finds the other ranks and joins the process group.

        Raises ConfigError where the environment makes no sense, the device or the backend is not there, or the ranks
        run different things; PeerLost, which names them, where some do not come.
        """
        launch = read_launch_env()
        device = self._device(launch.local_rank)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        sharing = 1
        if launch.world > 1 and not dist.is_initialized():
            sharing = self._join(launch, device)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        elif sharing > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores() // sharing))
        return Comm(launch.rank, launch.world, launch.local_rank, device)

    def _device(self, local_rank: int) -> torch.device:
        """Of those that this process sees, which may be all of the host's or its own alone."""
        found = torch.accelerator.current_accelerator(check_available=True)
        if self.device == "cpu" or (self.device == "auto" and found is None):
            return torch.device("cpu")
        if found is None or self.device not in ("auto", found.type):
            name = {"cuda": "CUDA"}.get(self.device, self.device)
            there = "" if found is None else f" (torch {torch.__version__} has {found.type})"
            raise ConfigError(
                f"distributed.device={self.device} but no {name} device is visible{there}: use distributed=cpu, or "
                "check the driver"
            )
        count = torch.accelerator.device_count()
        require(
            count == 1 or local_rank < count,
            f"local rank {local_rank} has no {found.type} device of its own, {node_name()} shows it {count}: start as "
            "many processes on a host as it has devices, or give each process one",
        )
        return torch.device(found.type, local_rank % count)

    def _join(self, launch: LaunchEnv, device: torch.device) -> int:
        """Returns how many ranks share this one's cores."""
        from clipx.distributed.rendezvous import rendezvous

        backend = self._backend(device)
        facts = {"clipx": code_version(), "device": device.type, "backend": backend, "torch?": torch.__version__}
        store, sharing = rendezvous(launch, facts, self.rendezvous_s)
        timeout = timedelta(seconds=self.timeout_s)
        store.set_timeout(timeout)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=launch.rank,
                world_size=launch.world,
                timeout=timeout,
                device_id=None if device.type == "cpu" else device,
            )
        except RuntimeError as error:
            raise PeerLost(
                f"the ranks met at {launch.endpoint}, but {backend} did not connect them "
                f"({str(error).splitlines()[0]}): name the network between the hosts by GLOO_SOCKET_IFNAME or "
                "NCCL_SOCKET_IFNAME, and open its ports"
            ) from error
        return sharing

    def _backend(self, device: torch.device) -> str:
        """Raises ConfigError where this torch lacks it, or it does not move tensors of the device."""
        if self.backend == "auto":
            own = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
            return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
        by_device = dict(part.split(":") for part in self.backend.split(",")) if ":" in self.backend else {}
        for name in by_device.values() or [self.backend]:
            require(
                dist.is_backend_available(name),
                f"distributed.backend={self.backend}: torch {torch.__version__} has no {name} here, choose from "
                f"{', '.join(filter(dist.is_backend_available, dist.Backend.backend_list))}, or auto",
            )
        moved = by_device or dist.Backend.backend_capability.get(self.backend.lower(), [device.type])
        require(
            device.type in moved,
            f"distributed.backend={self.backend} does not move tensors of {device.type}: use auto, or "
            f"distributed.device={next(iter(moved))}",
        )
        return self.backend
