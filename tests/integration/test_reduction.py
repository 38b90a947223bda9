"""Sums of gradients over micro-batches and ranks, in the number formats and ways of data parallelism."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn

from clipx.distributed.ddp import Compression, DdpSpec
from clipx.optimizer.master import MasterWeights

MICRO_BATCHES = 16


def errors_of_sums(spec: DdpSpec) -> dict[str, float]:
    """Returns the largest errors of sums over micro-batches and ranks, relative to the largest gradient of a parameter.

    `masters`: of master weights, `narrow`: of sums in bfloat16. The exact sums are those in float64 of the gradients of
    each micro-batch. Collective.
    """
    comm = spec.build()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 3 * 3, 8))
    layers.to(memory_format=torch.channels_last)
    masters = MasterWeights(layers, torch.bfloat16)
    parallel = spec.wrap(masters.model, comm, masters.by_parameter)
    masters.averaged = parallel is not masters.model
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in masters.model.parameters()]
    narrow = [torch.zeros_like(p) for p in masters.model.parameters()]
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [torch.randn(4, 3, 4, 4, generator=generator).bfloat16() for _ in range(MICRO_BATCHES)]
    for x in batches:
        masters.model(x).float().square().mean().backward()
        for p, total, rounded in zip(masters.model.parameters(), exact, narrow, strict=True):
            assert p.grad is not None
            total += p.grad
            rounded += p.grad
            p.grad = None
    for total, rounded in zip(exact, narrow, strict=True):
        total.copy_(comm.sum(total) / comm.world)
        rounded.copy_(comm.sum(rounded) / comm.world)

    for _repeat in range(2):  # the second time in buckets that DDP has rebuilt
        for i, x in enumerate(batches):
            if comm.world > 1:
                parallel.require_backward_grad_sync = i == len(batches) - 1
            parallel(x).float().square().mean().backward()
        masters.copy_gradients_from_model()
        assert all(p.grad is None for p in masters.model.parameters())
        found = []
        for master in layers.parameters():
            assert master.grad is not None and master.grad.dtype == torch.float32
            assert master.grad.stride() == master.stride()
            found.append(master.grad.double())
            master.grad = None
    comm.close()
    return {"masters": _error(found, exact), "narrow": _error([x.double() for x in narrow], exact)}


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(("ranks", "view"), [(1, False), (2, False), (2, True)])
def test_master_gradients_are_summed_in_float32(ranks: int, view: bool, two_ranks: Ranks) -> None:
    spec = DdpSpec(device="cpu", gradient_as_bucket_view=view)
    found = errors_of_sums(spec) if ranks == 1 else two_ranks.call(errors_of_sums, spec)[0]
    assert found["masters"] < 1e-6
    assert found["narrow"] > 1e-3  # in 16 bits, as without the masters


def test_compression_rounds_the_sums_of_master_gradients_once(two_ranks: Ranks) -> None:
    found, _ = two_ranks.call(errors_of_sums, DdpSpec(device="cpu", compression=Compression.bf16))
    assert 1e-4 < found["masters"] < 2**-7
