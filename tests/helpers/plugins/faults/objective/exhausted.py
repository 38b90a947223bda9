"""The default objective, on one rank out of memory in its third step."""

import torch

from clipx.config.duration import Length
from clipx.config.registry import frozen, register
from clipx.distributed.comm import Comm
from clipx.objective.base import Objective
from clipx.objective.infonce import InfoNCESpec

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"


@register("objective")
@frozen
class ExhaustedSpec(InfoNCESpec):
    kind: str = "exhausted"
    rank: int = 1  # the rank out of memory
    host: bool = False  # of the host, not of the device

    def build(self, comm: Comm, length: Length) -> Objective:
        objective = InfoNCESpec.build(self, comm, length)
        steps = 0

        def fail(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == 3 and comm.rank == self.rank:
                raise MemoryError if self.host else torch.OutOfMemoryError(CUDA)

        objective.register_forward_pre_hook(fail)
        return objective
