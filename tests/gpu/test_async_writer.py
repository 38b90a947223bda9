"""Checkpoints of tensors on a CUDA device."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from helpers import needs_cuda
from helpers.savers import load_tensors, make_writer

from clipx.distributed.comm import Comm

pytestmark = [pytest.mark.gpu, needs_cuda]


def test_a_save_from_a_gpu_holds_the_values_at_the_call(tmp_path: Path, gate: threading.Event) -> None:
    device = torch.device("cuda", 0)
    x, strided = torch.randn(3_000_001, device=device), torch.randn(64, 32, device=device).T
    expected = {"x": x.cpu(), "strided": strided.cpu(), "rng": torch.get_rng_state()}
    run = make_writer(tmp_path, comm=Comm(0, 1, 0, device))
    run.save(1, {"x": x, "strided": strided, "rng": torch.get_rng_state()}, {})
    assert run._replicated._memory is not None and run._replicated._memory.is_pinned()
    x.fill_(0)
    strided.fill_(0)
    torch.cuda.synchronize()
    gate.set()
    run.wait()
    run.close()
    found = load_tensors(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_updates_wait_on_the_device_for_copies_that_run_during_a_step(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    weight, buffer = (torch.randn(50_000_000, device=device) for _ in range(2))
    expected = {"weight": weight.cpu(), "buffer": buffer.cpu()}
    run = make_writer(tmp_path, comm=Comm(0, 1, 0, device))
    run.save(1, {"weight": weight, "buffer": buffer}, {}, until_update={"weight"})
    buffer.fill_(0)  # as BatchNorm's averages in the next forward pass
    run.hold_updates()
    weight.fill_(0)
    run.wait()
    assert run._replicated._memory is not None and len(run._replicated._memory) == 400_000_000
    run.close()
    found = load_tensors(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
