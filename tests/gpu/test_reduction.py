"""The communication hook of DDP over a process group of one rank, whose callback runs on another stream of CUDA."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clipx.distributed.ddp import average_bucket

pytestmark = pytest.mark.gpu


def test_compressed_gradients_are_those_of_float32_but_for_their_rounding(device: torch.device) -> None:
    """Later kernels of the backward pass allocate memory while the averages of earlier buckets are copied."""
    width, batch = (4096, 8192) if device.type == "cuda" else (64, 128)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(12))).to(device)
    exact, x = copy.deepcopy(model), torch.randn(batch, width, device=device)
    exact(x).square().mean().backward()
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        wrapped.register_comm_hook({}, lambda masters, bucket: average_bucket(bucket, masters, torch.bfloat16))
        for _repeat in range(3):  # from the second time on in the buckets that DDP has rebuilt
            model.zero_grad()
            wrapped(x).square().mean().backward()
            for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
                assert found.grad is not None and expected.grad is not None and found.grad.any()
                torch.testing.assert_close(found.grad, expected.grad, rtol=2**-8, atol=0)
    finally:
        dist.destroy_process_group()
