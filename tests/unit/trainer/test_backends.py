"""Backends of a run: deterministic algorithms, cuDNN and the allocator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clipx.trainer import backends
from clipx.trainer.backends import configure_backends, prepare_backends

CUDA = torch.device("cuda", 0)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def _backends_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    saved = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    deterministic: Any = torch.utils.deterministic  # a module whose attributes are properties
    fill = deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = saved
    deterministic.fill_uninitialized_memory = fill
    os.environ.pop(WORKSPACE, None)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for a CUDA device. Returns the settings that its allocator receives."""
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(backends, "set_allocator_settings", settings.append)
    for name in backends._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    return settings


def test_a_cuda_device_measures_convolutions_and_grows_segments(allocator: list[str]) -> None:
    found = configure_backends(False, CUDA)
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert allocator == ["expandable_segments:True"]
    assert found == "NVIDIA H200, cudnn.benchmark, expandable segments"


def test_a_deterministic_run_measures_nothing(allocator: list[str]) -> None:
    """Flash and memory-efficient attention are deterministic only if warn_only is not set."""
    prepare_backends(True)
    found = configure_backends(True, CUDA)
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"
    assert found == "NVIDIA H200, deterministic algorithms, expandable segments"
    configure_backends(False, CUDA)
    assert not torch.are_deterministic_algorithms_enabled()
