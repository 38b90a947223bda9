"""Measuring processes of the network benchmark: times of collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from clipx.bench.measure import interleaved
from clipx.distributed.comm import Comm

KINDS = ("all_gather", "all_reduce", "broadcast")


def collective_times(comm: Comm, sizes: Sequence[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Returns the seconds on this rank in each round, by kind and size in bytes of the larger side. Collective."""
    steps = {(kind, size): _step(kind, size, comm.world, comm.device) for kind in KINDS for size in sizes}
    interleaved(steps, 1, comm)  # the warm-up
    return interleaved(steps, rounds, comm)


def _step(kind: str, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(-(-size // (4 * ranks)) * ranks, device=device)
    part = whole.chunk(ranks)[0].clone()
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[kind]
