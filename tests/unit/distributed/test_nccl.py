"""Choices for NCCL that need no device: its process group, the id of the GPU, and the text of its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clipx.distributed import rendezvous
from clipx.distributed.ddp import DdpSpec
from clipx.distributed.fsdp import FsdpSpec
from clipx.distributed.launch_env import LaunchEnv
from clipx.errors import PeerLost

NCCL2 = "TORCH_DIST_USE_NCCL2"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("spec", "device", "version", "before", "after"),
    [
        (DdpSpec(), CUDA, "2.15.0+cu130", None, "0"),
        (DdpSpec(backend="cpu:gloo,cuda:nccl"), CUDA, "2.15.0", None, "0"),
        (DdpSpec(), CUDA, "2.15.0", "1", "1"),
        (DdpSpec(), CUDA, "2.14.1", None, None),
        (DdpSpec(), CPU, "2.15.0", None, None),
        (DdpSpec(backend="gloo"), CUDA, "2.15.0", None, None),
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


def test_the_group_is_chosen_after_torch_is_imported() -> None:
    """torch reads the variable when the backend is first needed, after its availability was asked for."""
    script = """
import torch, torch.distributed as dist
from clipx.distributed.ddp import DdpSpec
dist.is_backend_available("nccl")
DdpSpec().prepare_group(torch.device("cuda", 0))
if torch.__version__.startswith("2.15."):
    dist.Backend._ensure_backend_registered("nccl")
    print(dist.Backend._plugins["NCCL"].creator_fn.__name__)
else:
    print("_create_nccl_process_group")
"""
    env = {name: value for name, value in os.environ.items() if name != NCCL2}
    found = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "_create_nccl_process_group"


@pytest.mark.parametrize(("backend", "sent"), [("auto", "GPU-4f"), ("nccl-legacy", "GPU-4f"), ("gloo", None)])
def test_joining_sends_the_gpu_and_quotes_the_whole_error_of_nccl(
    backend: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = (
        "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000\n"
        "Exception raised from create at NCCLUtils.cpp:94 (most recent call first):\nframe #0: c10::Error"
    )
    gpus = list[str | None]()

    def meet(launch: LaunchEnv, facts: object, wait_s: float, gpu: str | None) -> tuple[dist.Store, int]:
        gpus.append(gpu)
        return dist.HashStore(), 1

    def fail(*_: object, **__: object) -> None:
        raise dist.DistBackendError(message)

    monkeypatch.setattr(rendezvous, "rendezvous", meet)
    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-4f"))
    monkeypatch.setenv(NCCL2, "1")
    with pytest.raises(PeerLost) as raised:
        DdpSpec(backend=backend)._join(LaunchEnv(1, 2), CUDA)
    assert gpus == [sent]
    assert "Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000): set" in str(raised.value)
    assert "frame #0" not in str(raised.value) and "\n" not in str(raised.value)
