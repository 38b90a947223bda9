"""Counts what a training step hands to its collectives, to check `clipx.plan.traffic`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clipx.distributed.comm import Comm
from clipx.plan.traffic import Kinds
from clipx.trainer.spec import compose

_WARM_UP = 2  # steps: in the second DDP orders its buckets anew, which takes collectives of its own


def counted(comm: Comm, overrides: Sequence[Sequence[str]], folder: str) -> list[Kinds]:
    """What one step of each run moves, by the operators of its process group. A real trainer takes it, on one of
    several ranks."""
    from clipx.bench.measure import Collectives
    from clipx.run.signals import Stop
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
            Stop(tell=False).agreed(trainer.comm)
        trainer.close()
        found.append({kind: (row["calls"], max(row["sent"], row["received"])) for kind, row in seen.kinds.items()})
    return found
