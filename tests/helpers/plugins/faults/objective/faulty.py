"""The default objective, with faults on one rank and a log of where it runs."""

import os

from clipx.config.duration import Length
from clipx.config.registry import frozen, register
from clipx.distributed.comm import Comm
from clipx.objective.base import Objective
from clipx.objective.infonce import InfoNCESpec

WORD = "first"


@register("objective")
@frozen
class FaultySpec(InfoNCESpec):
    kind: str = "faulty"
    rank: int | None = None  # the failing rank

    def build(self, comm: Comm, length: Length) -> Objective:
        print(f"word={WORD} devices={os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
        if comm.rank == self.rank:
            raise RuntimeError(f"a bug of rank {comm.rank}")
        return InfoNCESpec.build(self, comm, length)
