"""Collectives of a run. Model and objective code calls `comm.gather(x)` and does not use rank numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from clipx.config.lazy_torch import dist, torch
from clipx.distributed.consistency import describe_mismatch, digest
from clipx.distributed.launch_env import node_name
from clipx.errors import ClipxError, ConfigError, known_failure

if TYPE_CHECKING:
    from clipx.distributed.heartbeat import Heartbeats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comm:
    """Rank, world size, device and collectives of a process.

    With one rank each collective is the identity or a no-op. A run gets it from `spec.distributed.build()`.

    Args:
        rank: number of this process among all, in `[0, world)`.
        world: number of ranks.
        local_rank: number of this process among those of its host.
        device: device on which this rank computes.
        sharing: number of ranks that share the cores of this rank, itself included.

    Shape:
        b local batch, B = world·b global batch, D embedding.

        - `gather` and `gather_with_gradient`: `[b, …]` -> `[B, …]`, in the order of the ranks.
        - `gather_coalesced`: `[b, D]` each -> `[B, D]` each.
        - `sum`: any shape -> the same shape.
        - `norm`: tensors of any shape -> 0-dim.

    Raises:
        ConfigError: `require_equal` finds different values on the ranks.
        ClipxError: `run_on_main` failed on rank 0; the error is the same on all ranks.

    Example:
        One rank, for a test or a notebook:

            >>> import torch
            >>> from clipx.distributed import Comm
            >>> comm = Comm(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
            >>> comm.gather(torch.eye(2)).tolist()
            [[1.0, 0.0], [0.0, 1.0]]
            >>> comm.norm([torch.tensor([3.0]), torch.tensor([4.0])])
            tensor(5.)
            >>> comm.is_main, comm.gather_objects("a fact of this rank")
            (True, ['a fact of this rank'])
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    sharing: int = 1  # number of ranks that share the cores of this rank, itself included
    _heartbeats: Heartbeats | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, x_b: torch.Tensor) -> torch.Tensor:
        """Gathers [b, ...] from each rank into [world·b, ...] on all, in rank order. Not differentiable. Collective."""
        if self.world == 1:
            return x_b
        x_b = x_b.contiguous()
        out = x_b.new_empty((self.world * x_b.shape[0], *x_b.shape[1:]))
        dist.all_gather_into_tensor(out, x_b)
        return out

    def gather_with_gradient(self, x_b: torch.Tensor) -> torch.Tensor:
        """Returns what `gather` returns. The rows of this rank carry a gradient, those of others none. Collective."""
        x_B, first = self.gather(x_b.detach()), self.rank * len(x_b)
        return torch.cat([x_B[:first], x_b, x_B[first + len(x_b) :]])

    def gather_coalesced(self, *parts_bD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gathers several [b, D] tensors of one dtype in one collective. The results may be strided views."""
        if self.world == 1:
            return parts_bD
        gathered_BD = self.gather(torch.cat(parts_bD, 1))
        return tuple(torch.split(gathered_BD, [part.shape[1] for part in parts_bD], 1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `x` over all ranks as a new tensor. Collective."""
        if self.world == 1:
            return x
        out = x.clone()
        dist.all_reduce(out)
        return out

    def norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the joint norm of all tensors, 0-dim on `device`. A DTensor counts with all shards. Collective."""
        from torch.distributed.tensor import DTensor

        sharded = [x for x in tensors if isinstance(x, DTensor)]
        local = [x for x in tensors if not isinstance(x, DTensor)]
        norms = [torch.nn.utils.get_total_norm(group) for group in (sharded, local) if group]
        norms = [norm.to(self.device) for norm in norms]
        full = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return full[0] if len(full) == 1 else torch.linalg.vector_norm(torch.stack(full))

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Averages over the ranks the gradients of a module that DDP or FSDP does not wrap. One collective."""
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if self.world == 1 or not grads:
            return
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.world
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    def gather_objects(self, value: Any) -> list[Any]:
        """Gathers a small Python value from every rank onto all ranks, in rank order. Collective."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks. Collective."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def run_on_main(self, call: Callable[[], T]) -> T:
        """Runs `call` on rank 0 only; returns its (small) value, or raises its error, on all ranks. Collective.

        An error of the system, such as a full disk, becomes a ClipxError. A fault of clipx ends rank 0 alone.
        """
        value: T | ClipxError | None = None
        if self.is_main:
            try:
                value = call()
            except Exception as error:
                value = known_failure(error)
                if self.world == 1 or value is None:
                    raise
        value = self.broadcast_object(value)
        if isinstance(value, ClipxError):
            raise value
        return cast("T", value)

    def require_equal(self, **facts: str | dict[str, Any]) -> None:
        """Raises ConfigError on all ranks if a fact, a text or plain values by key, differs. Names the ranks and hosts.

        Costs one gather of short hashes. Collective.
        """
        if self.world == 1:
            return
        gathered = self.gather_objects((node_name(), {name: digest(fact) for name, fact in facts.items()}))
        hosts = [host for host, _ in gathered]
        for name, fact in facts.items():
            if len({digests[name] for _, digests in gathered}) == 1:
                continue
            values = [v if isinstance(v, dict) else {name: v} for v in self.gather_objects(fact)]
            keys = dict.fromkeys(key for value in values for key in value)
            mismatches = (describe_mismatch(key, [value.get(key, "none") for value in values], hosts) for key in keys)
            raise ConfigError(
                f"{'; '.join(filter(None, mismatches))}: start all ranks with the same command, files and data"
            )

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def naming_lost_peers(self) -> contextlib.AbstractContextManager[None]:
        """Context of `Heartbeats.naming`, which ends this process with the rank that failed, is lost or is late."""
        return contextlib.nullcontext() if self._heartbeats is None else self._heartbeats.naming()

    def follow(self, step: Callable[[], int], end: Callable[[str], object]) -> None:
        """Sets `step`, which returns the current step for errors, and `end`, which ends this process with a reason."""
        if self._heartbeats is not None:
            self._heartbeats.follow(step, end)

    def leave(self) -> None:
        """Ends the watch over the other ranks, when this one needs them no more, or after its error."""
        if self._heartbeats is not None:
            self._heartbeats.stop()

    def close(self) -> None:
        self.leave()
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Agreement:
    """The largest value over all ranks of small integers of the host, one call late: nothing waits for a reduction."""

    def __init__(self) -> None:
        self._begun: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self, comm: Comm, value: int) -> int:
        """Returns the largest value of the previous call, 0 in the first one, and starts to exchange this one.

        With one rank it returns the value at once. Collective.
        """
        if comm.world == 1:
            return value
        found = 0
        if self._begun is not None:
            values, work = self._begun
            work.wait()
            found = int(values)
        values = torch.tensor(value)
        self._begun = values, dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)
        return found
