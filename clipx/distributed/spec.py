"""Options that ddp and fsdp share: device, backend, time limits, threads. `build` joins the process group."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import dist, torch
from clipx.config.options import option, typed
from clipx.config.registry import MISSING, frozen
from clipx.distributed.comm import Comm
from clipx.distributed.consistency import code_version
from clipx.distributed.launch_env import LaunchEnv, allocated_gpus, cores, node_name, read_launch_env, warn_of_few_cores
from clipx.errors import ConfigError, PeerLost, require, require_effect

if TYPE_CHECKING:
    from torch.distributed import Store

    from clipx.distributed.heartbeat import Heartbeats
    from clipx.model.clip import CLIP


Masters = Mapping["torch.nn.Parameter", "torch.nn.Parameter"]

# Device types of torch.accelerator, in torch itself or from a vendor's package.
_DEVICES = ("auto", "cpu", "cuda", "xpu", "hpu", "npu", "mps", "mtia", "mlu", "musa")
_WEEK_S = 604_800  # far below where the clocks of Python and of torch overflow
_BACKEND = re.compile(r"[\w-]+|\w+:[\w-]+(,\w+:[\w-]+)*")


def _check_backend(key: str, text: str) -> None:
    named = _BACKEND.fullmatch(text) is not None
    require(named, f"{key}={text} is not a backend: give auto, or a name such as nccl or cpu:gloo,cuda:nccl")


@frozen
class DistributedSpec:
    """Process group and device. Works the same under plain python, torchrun, srun, submitit and MPI."""

    kind: str = MISSING
    """Name of the option: ddp or fsdp."""

    device: str = option("auto", choices=_DEVICES)
    """Device type on which each rank computes: cpu, cuda, xpu, hpu, npu, mps, mtia, mlu or musa. auto: the accelerator
    that torch finds, else cpu."""

    backend: str = option("auto", check=_check_backend)
    """Backend of torch.distributed: a name such as nccl or nccl-legacy, or one name per device type, such as
    cpu:gloo,cuda:nccl. auto: torch's default for the device (nccl on cuda, gloo on cpu). An error on one rank."""

    rendezvous_s: float = option(300.0, gt=0, le=_WEEK_S, unit="s")
    """Seconds that ranks wait for each other at the start. The run then fails and names the missing ranks."""

    timeout_s: float = option(600.0, gt=0, le=_WEEK_S, unit="s")
    """Seconds after which a collective fails because a rank has not joined it."""

    watchdog_s: float = option(1800.0, ge=0, le=_WEEK_S, unit="s", hint="0 disables it")
    """Seconds without a step, or progress of an evaluation or a checkpoint, after which the process dumps its stack
    traces and exits with code 70. 0 disables it. The default exceeds timeout_s, so that ranks
    waiting for another rank can name it first."""

    threads: int | None = option(None, ge=1, le=1024, hint="null shares the cores among the ranks of a host")
    """Number of torch's CPU threads in each rank; more than one for each core that the rank may use is a
    warning. null: OMP_NUM_THREADS if it is set (torchrun sets it to 1), else ranks that may use the same cores divide
    them among themselves."""

    sync_batchnorm: bool = False
    """Normalizes in BatchNorm by the statistics of all ranks' micro-batches together instead of each rank's
    micro-batch. The micro-batches of a rank stay separate. An error for a model without trainable BatchNorm, and on
    one rank."""

    shards_parameters: ClassVar[bool] = False
    """Declares that a rank holds only a shard of each parameter and of the optimizer's state."""

    need_ranks: ClassVar[tuple[str, ...]] = ()
    """Options without effect on one rank, where other values than the defaults are errors, as is one of backend."""

    def check_precision(self, kind: str, weight_format: str | None, autocasts: bool) -> None:
        """Raises ConfigError if the format of gathered weights does not fit the number format."""

    def prepare_group(self, device: torch.device) -> None:
        """Sets what must be set before the process group is made, for a rank on `device`."""

    def describe(self, device: torch.device) -> str:
        """Returns what `prepare_group` chose, for the log at the start of a run; empty if nothing."""
        return ""

    def prepare(self, model: CLIP, comm: Comm, autocast: torch.dtype | None = None) -> None:
        """Modifies the model in place. Call it before the optimizer is created. Raises ConfigError. Collective.

        `autocast`: dtype of the towers' products under autocast; None: no autocast.
        """
        if self.sync_batchnorm:
            from clipx.distributed.batchnorm import synchronize

            synchronize(model, comm)

    def wrap(self, model: CLIP, comm: Comm, masters: Masters | None = None) -> torch.nn.Module:
        """Returns the module that training calls instead of the model. Collective.

        `masters`: the float32 parameter of each 16-bit parameter, whose `.grad` receives the averaged gradient.
        """
        return model

    @contextlib.contextmanager
    def joined(self) -> Iterator[Comm]:
        """Context of a command with the `Comm` of `build`, in which a rank that fails or is lost ends the others."""
        comm = self.build()
        try:
            with comm.naming_lost_peers():
                yield comm
                comm.barrier()  # else rank 0, which may serve the store, could end before the others are done
        except BaseException:  # another rank may be blocked, and closing the group would block
            comm.leave()
            raise
        comm.close()

    def build(self) -> Comm:
        """Waits for the other ranks and joins the process group. Until `Comm.leave`, a lost rank ends this process.

        Raises ConfigError if the environment is invalid, the device or the backend is not available, or the ranks run
        different code or devices; PeerLost, which names the missing ranks, if some do not join. Collective.
        """
        launch = self.check_launch()
        device = self._device(launch.local_rank)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        if launch.world == 1:
            self._backend(device)
            self._check_one_rank("backend")
        sharing, heartbeats = (1, None) if launch.world == 1 else self._join(launch, device)
        if self.threads is not None:
            warn_of_few_cores("distributed.threads", self.threads, launch.rank)
            torch.set_num_threads(self.threads)
        elif sharing > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores() // sharing))
        return Comm(launch.rank, launch.world, launch.local_rank, device, sharing, heartbeats)

    def check_launch(self) -> LaunchEnv:
        """Reads the launcher's environment. Raises ConfigError if it is invalid, and on one rank for options between
        ranks. Imports no torch."""
        launch = read_launch_env()
        if launch.world == 1:
            self._check_one_rank(*self.need_ranks)
        return launch

    def _check_one_rank(self, *names: str) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in names:
            value = getattr(self, name)
            fix = "remove it, or start several ranks with torchrun or srun"
            require_effect(value == defaults[name], f"distributed.{name}={typed(value)}", "on one rank", fix)

    def _device(self, local_rank: int) -> torch.device:
        """Returns the device of a local rank. A process may see all devices of its host, or only one."""
        found = torch.accelerator.current_accelerator(check_available=True)
        if self.device == "cpu" or (self.device == "auto" and found is None):
            gpus = 0 if self.device == "cpu" else allocated_gpus()
            require(
                not gpus,
                f"the job has GPUs on {node_name()} (SLURM_GPUS_ON_NODE={gpus}), but torch {torch.__version__} finds "
                "no accelerator: check nvidia-smi and torch's build there, or train on the CPU by distributed=cpu",
            )
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
            f"local rank {local_rank} has no {found.type} device, {count} are visible on {node_name()}: start one "
            "process per device of the host, or make one device visible to each process",
        )
        return torch.device(found.type, local_rank % count)

    def _join(self, launch: LaunchEnv, device: torch.device) -> tuple[int, Heartbeats]:
        """Joins the process group. Returns the number of ranks that share this rank's cores, and the heartbeats."""
        from clipx.distributed.heartbeat import Heartbeats
        from clipx.distributed.rendezvous import rendezvous, wait_until_read

        if dist.is_initialized():
            return 1, Heartbeats.start_in_group(launch.rank, launch.world)
        backend = self._backend(device)
        facts = {"clipx": code_version(), "device": device.type, "backend": backend, "torch?": torch.__version__}
        gpu = str(torch.cuda.get_device_properties(device).uuid) if "cuda:nccl" in backend else None
        store, sharing, heartbeats = rendezvous(launch, facts, self.rendezvous_s, gpu)
        try:
            with heartbeats.naming():
                self._connect(launch, device, store, backend, heartbeats)
        except BaseException:
            heartbeats.stop()
            wait_until_read(store, launch)
            raise
        return sharing, heartbeats

    def _connect(self, launch: LaunchEnv, device: torch.device, store: Store, backend: str, peers: Heartbeats) -> None:
        """Makes the process group. Raises PeerLost."""
        self.prepare_group(device)
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
            peers.end_if_lost()
            reason = " ".join(str(error).partition("Exception raised from")[0].split())  # without the C++ stack
            raise PeerLost(
                f"the ranks joined the rendezvous at {launch.endpoint}, but {backend} did not connect them ({reason}): "
                "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network interface between the hosts, and open its "
                "ports"
            ) from error

    def _backend(self, device: torch.device) -> str:
        """Returns the backend's name. Raises ConfigError if torch lacks it or it does not move the device's tensors."""
        if self.backend == "auto":
            name = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
            return name if device.type == "cpu" else f"cpu:gloo,{device.type}:{name}"
        by_device = dict(part.split(":") for part in self.backend.split(",")) if ":" in self.backend else {}
        for name in by_device.values() or [self.backend]:
            require(
                dist.is_backend_available(name),
                f"distributed.backend={self.backend}: torch {torch.__version__} has no backend {name}: choose from "
                f"{', '.join(filter(dist.is_backend_available, dist.Backend.backend_list))}, or auto",
            )
        moved = by_device or dist.Backend.backend_capability.get(self.backend.lower(), [device.type])
        require(
            device.type in moved,
            f"distributed.backend={self.backend} does not move tensors of {device.type}: use auto, or "
            f"distributed.device={next(iter(moved))}",
        )
        if "cpu" in moved:
            return self.backend
        return f"cpu:gloo,{self.backend if by_device else f'{device.type}:{self.backend}'}"  # host values need a group
