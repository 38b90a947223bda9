"""The communication hook of DDP: which memory its callback uses, which runs on a stream of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.savers import run_in_processes
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from clipx.distributed import reduction
from clipx.distributed.comm import Comm
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.reduction import WideReduction, average_bucket
from clipx.optimizer.master import MasterWeights

WORLD = 2
SHAPES = ((3, 4), (5,))


class Bucket:
    """The part of torch's GradBucket that the hook uses: gradients one after the other."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffer = torch.cat([torch.randn(p.numel()) for p in parameters]).to(parameters[0].dtype)

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


@dataclass
class Exchange:
    """A collective whose end the test decides: its work, its future, and its value."""

    sent: Tensor
    received: Callable[[Any], Tensor] = lambda future: torch.empty(0)

    def get_future(self) -> Exchange:
        return self

    def then(self, received: Callable[[Any], Tensor]) -> Exchange:
        self.received = received
        return self

    def value(self) -> list[Tensor]:
        return [self.sent]


class Storages(TorchDispatchMode):
    """Records the memory that operations use."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        self.found |= {x.untyped_storage().data_ptr() for x in tensors}
        return out


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("exchanged", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("dtype", "mastered"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_callback_uses_no_memory_that_the_allocator_may_give_away(
    dtype: torch.dtype, mastered: bool, exchanged: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch records the future's value on the callback's stream, DDP has the bucket, and masters have their sums."""
    torch.manual_seed(0)
    exchanges = list[Exchange]()

    def all_reduce(x: Tensor, async_op: bool) -> Exchange:
        assert async_op
        exchanges.append(Exchange(x))
        return exchanges[-1]

    monkeypatch.setattr(reduction.dist, "all_reduce", all_reduce)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    masters = {p: nn.Parameter(torch.zeros(p.shape)) for p in parameters} if mastered else {}
    bucket = Bucket(parameters)
    local = bucket.buffer().clone()
    average_bucket(WideReduction(WORLD, masters, exchanged), bucket)
    (exchange,) = exchanges
    exchange.sent *= WORLD  # the other rank has the same gradients: their mean is this rank's
    with Storages() as used:
        returned = exchange.received(exchange)
    assert storage(returned) == storage(bucket.buffer())
    held = {storage(master.grad) for master in masters.values() if master.grad is not None}
    assert used.found <= {storage(bucket.buffer()), storage(exchange.sent), *held}
    tolerance = 0.0 if exchanged is None else 2**-8
    averages = [master.grad for master in masters.values()] if mastered else bucket.gradients()
    for average, part in zip(averages, local.split([p.numel() for p in parameters]), strict=True):
        assert average is not None and average.any()
        torch.testing.assert_close(average.flatten().float(), part.float(), rtol=tolerance, atol=0)


def wrapped(comm: Comm) -> list[list[float]]:
    """Wraps a model with other weights on each rank. Returns its weights in bfloat16, and their masters."""
    torch.manual_seed(comm.rank)
    masters = MasterWeights(nn.Linear(3, 4), torch.bfloat16)
    DdpSpec().wrap(masters.model, comm, masters.by_parameter)  # type: ignore[arg-type]
    return [x.detach().flatten().tolist() for pair in masters.by_parameter.items() for x in pair]


def test_all_ranks_begin_with_the_masters_of_rank_0(tmp_path: Path) -> None:
    first, second = run_in_processes(2, tmp_path, wrapped)
    assert len(first) == 4 and all(map(any, first))
    assert first == second
