"""Values that all ranks agree on without a wait: each reduction is started after one step and read after the next."""

from __future__ import annotations

from clipx.config.lazy_torch import dist, torch
from clipx.distributed.comm import Comm


class Agreement:
    """The largest value over all ranks of small integers of the host, one call late.

    The reduction runs on the host's group, so that neither the device nor a rank waits for it: all ranks read the same
    result in the same call. With one rank the values are returned at once.
    """

    def __init__(self) -> None:
        self._begun: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self, comm: Comm, value: int) -> int:
        """Returns the largest value of the previous call, 0 in the first one, and starts to exchange this one.

        Collective.
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
