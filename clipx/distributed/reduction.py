"""Averages of gradients over the ranks in float32, a communication hook of DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from clipx.distributed.spec import Masters


@dataclass(frozen=True, slots=True)
class WideReduction:
    """State of `average_bucket`.

    `masters`: see `DistributedSpec.wrap`. `exchanged`: dtype in which the sums are exchanged; None: at least float32.
    """

    world: int
    masters: Masters
    exchanged: torch.dtype | None


def average_bucket(state: WideReduction, bucket: Any) -> Future[Tensor]:
    """Averages the gradients of a bucket in float32, or float64 for float64.

    `bucket`: a GradBucket of DDP. A parameter with a master gets its average, and what earlier micro-batches added, in
    the master's `.grad`, which is then a view of the sum: no further copy, and no rounding to 16 bits. The bucket
    itself stays as it is.
    """
    narrow: Tensor = bucket.buffer()
    wide = narrow.to(torch.promote_types(narrow.dtype, torch.float32), copy=True)
    parameters = bucket.parameters()
    masters = [state.masters.get(parameter) for parameter in parameters]
    first = narrow.storage_offset()
    for master, parameter, gradient in zip(masters, parameters, bucket.gradients(), strict=True):
        if master is not None:
            # The bucket has the strides of the parameter, e.g. channels_last, which its `gradients()` ignore.
            part = wide.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset() - first)
            if master.grad is not None:
                part += master.grad
            master.grad = part
    wide /= state.world
    sent = wide if state.exchanged is None else wide.to(state.exchanged)
    mastered = any(master is not None for master in masters)

    def received(future: Future[list[Tensor]]) -> Tensor:
        """Runs on a stream of torch, which protects from reuse the future's value alone: nothing else that the caching
        allocator could give away may be read here. `wide` is in the `.grad` of masters, or not used."""
        (found,) = future.value()
        if not mastered:
            narrow.copy_(found)
        elif found.dtype != wide.dtype:
            wide.copy_(found)
        return narrow

    reduced: Future[Tensor] = dist.all_reduce(sent, async_op=True).get_future().then(received)
    return reduced
