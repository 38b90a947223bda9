"""One process or many: who am I, how do ranks talk. Science code sees `comm.gather(x)`, never a rank.

Start order: RANK and WORLD_SIZE (torchrun, MPI wrappers that export them), then a SLURM step of more than one task,
then a single process. The rendezvous is always env://.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from clipx.config import option
from clipx.errors import ClipxError, ConfigError, require
from clipx.lazy import dist, torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comm:
    """The ranks of a run. Every collective is the identity, or a no-op, when there is one rank."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, x_b: torch.Tensor) -> torch.Tensor:
        """[b, ...] on each rank -> [world·b, ...] on all, in rank order. Carries no gradient."""
        if self.world == 1:
            return x_b
        x_b = x_b.contiguous()
        out = x_b.new_empty((self.world * x_b.shape[0], *x_b.shape[1:]))
        dist.all_gather_into_tensor(out, x_b)
        return out

    def gather_together(self, *parts_bD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`gather` of several [b, D] tensors of one type in one collective. What it returns may be strided views."""
        if self.world == 1:
            return parts_bD
        gathered_BD = self.gather(torch.cat(parts_bD, 1))
        return tuple(torch.split(gathered_BD, [part.shape[1] for part in parts_bD], 1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, as a new tensor."""
        if self.world == 1:
            return x
        out = x.clone()
        dist.all_reduce(out)
        return out

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Averages the gradients of a module that data parallelism does not wrap, in one collective."""
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if self.world == 1 or not grads:
            return
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.world
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    def gather_objects(self, value: Any) -> list[Any]:
        """Small Python values from every rank, in rank order, on all ranks."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_main(self, call: Callable[[], T]) -> T:
        """Calls on rank 0 alone; its (small) value, or its ClipxError, is every rank's."""
        value: T | ClipxError | None = None
        if self.is_main:
            try:
                value = call()
            except ClipxError as error:
                if self.world == 1:
                    raise
                value = error
        value = self.from_main(value)
        if isinstance(value, ClipxError):
            raise value
        return cast("T", value)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


@option("distributed")
@dataclass(kw_only=True, slots=True)
class DistributedSpec:
    """Process group and device. The same under plain python, torchrun and srun."""

    kind: str = "auto"
    device: str = "auto"  # auto (cuda where there is one), cpu, cuda
    backend: str = "auto"  # auto (nccl on cuda, gloo on cpu) or the name of a torch.distributed backend
    timeout_s: float = 600.0  # a rank that does not answer for this long is an error

    def __post_init__(self) -> None:
        require(
            self.device in ("auto", "cpu", "cuda"),
            f"distributed.device={self.device} is not a device: choose from auto, cpu, cuda",
        )
        require(self.timeout_s > 0, f"distributed.timeout_s={self.timeout_s} must be above 0 s: the default is 600")

    def build(self) -> Comm:
        """Joins the process group. Raises ConfigError where the device is not there."""
        rank, world, local_rank = _place()
        device = self._device(local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if world > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend if self.backend == "auto" else self.backend,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=self.timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        return Comm(rank, world, local_rank, device)

    def _device(self, local_rank: int) -> torch.device:
        count = torch.cuda.device_count()
        if self.device == "cpu" or (self.device == "auto" and count == 0):
            return torch.device("cpu")
        require(
            count > 0, "distributed.device=cuda but no CUDA device is visible: use distributed=cpu, or check the driver"
        )
        return torch.device("cuda", local_rank % count)  # right whether a task sees all devices or only its own


def _place() -> tuple[int, int, int]:
    """(rank, world, local rank) of this process; fills in the rendezvous that the launcher left out."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    # An interactive shell inside an allocation has SLURM_* but no numeric step, or a step of one task.
    in_step = env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in env
    if in_step and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(15000 + int(env["SLURM_JOB_ID"]) % 15000))  # below the ephemeral range
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
    return 0, 1, 0


def _first_host(nodelist: str) -> str:
    if re.fullmatch(r"[\w.-]+", nodelist):
        return nodelist
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=True, timeout=30
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodelist} cannot be expanded ({error}): set MASTER_ADDR to the first host"
        ) from error
    return hosts[0]
