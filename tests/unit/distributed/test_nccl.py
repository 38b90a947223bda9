"""The choice of a process group of NCCL, which needs no device."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec

NCCL2 = "TORCH_DIST_USE_NCCL2"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("spec", "device", "version", "before", "after"),
    [
        (DdpSpec(), CUDA, "2.15.0+cu130", None, "0"),
        (DdpSpec(), CUDA, "2.15.0", "1", "1"),
        (DdpSpec(), CUDA, "2.14.1", None, None),
        (DdpSpec(), CPU, "2.15.0", None, None),
        (FsdpSpec(), CUDA, "2.15.0", None, None),
    ],
)
def test_ddp_leaves_the_group_of_nccl_whose_futures_wait(
    spec: Any, device: torch.device, version: str, before: str | None, after: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv(NCCL2, raising=False)
    if before is not None:
        monkeypatch.setenv(NCCL2, before)
    try:
        assert spec.describe(device) == ""
        spec.prepare_group(device)
        assert os.environ.get(NCCL2) == after
        said = "TORCH_DIST_USE_NCCL2=0, with which DDP overlaps the backward pass"
        assert spec.describe(device) == (said if after == "0" else "")
    finally:
        os.environ.pop(NCCL2, None)
