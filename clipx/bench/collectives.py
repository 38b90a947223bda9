"""Measuring processes of the network benchmark: times of collectives, and traffic of a training step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from clipx.bench.measure import Collectives, interleaved
from clipx.distributed.comm import Comm
from clipx.plan.traffic import CollectiveCounts
from clipx.trainer.spec import compose

KINDS = ("all_gather", "all_reduce", "broadcast")
_WARM_UP = 2  # steps: in the second DDP rebuilds its buckets, which takes additional collectives


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


def count_traffic(comm: Comm, overrides: Sequence[Sequence[str]], folder: str) -> list[CollectiveCounts]:
    """Counts the collectives of one step of each run, on the operators of its process group. Collective.

    The step is that of a real Trainer on one of several ranks. Returns calls and bytes of the larger side by kind.
    """
    from clipx.run.signals import StopSignals
    from clipx.trainer.trainer import Trainer

    ranks = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.world, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "localhost"})
    found = []
    for number, typed in enumerate(overrides):
        trainer = Trainer(compose(*typed, f"run_dir={Path(folder) / str(number)}", f"name={number}"))
        batches = iter(trainer._batches())
        for _ in range(_WARM_UP):
            trainer.step(next(batches))
        with Collectives() as seen:
            trainer.step(next(batches))
            StopSignals(verbose=False).received_by_any(trainer.comm)
        trainer.close()
        found.append({kind: (row["calls"], max(row["sent"], row["received"])) for kind, row in seen.kinds.items()})
    return found
