"""Gradients of master weights after several micro-batches on several ranks, and the error of sums in 16 bits.

master_gradients.py OUT KEY=VALUE... with options of DdpSpec. Rank 0 saves the largest errors, relative to the largest
gradient of each parameter: `masters`, and `narrow` of sums over micro-batches and ranks in bfloat16.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from clipx.distributed.ddp import Compression, DdpSpec
from clipx.optimizer.master import MasterWeights

MICRO_BATCHES = 16


def error(found: list[Tensor], exact: list[Tensor]) -> Tensor:
    return max(((a - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)))


options = dict(word.split("=") for word in sys.argv[2:])
spec = DdpSpec(
    device="cpu",
    compression=Compression(options.get("compression", "none")),
    gradient_as_bucket_view=options.get("gradient_as_bucket_view") == "true",
)
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

for x in batches:  # the gradients of each micro-batch alone
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
if comm.is_main:
    errors = {"masters": error(found, exact), "narrow": error([x.double() for x in narrow], exact)}
    save_file({name: value.double() for name, value in errors.items()}, sys.argv[1])
comm.close()
