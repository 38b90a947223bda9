"""Copies to staging memory: page-locked memory has the exact size, and updates wait for copies from a device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_cuda import fake_cuda
from helpers.runs import VIT, small, tensors
from helpers.savers import LateCopies, load_tensors, make_writer

from clipx.checkpoint import async_writer
from clipx.checkpoint.copies import HostMemory, PinnedMemory
from clipx.checkpoint.tensors import RankRows
from clipx.distributed.comm import Comm
from clipx.trainer.trainer import Trainer


class FakeCudart:
    """Records the memory that is registered with CUDA. `error`: result of each registration."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def use_cudart(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCudart], FakeCudart]:
    def use(cudart: FakeCudart) -> FakeCudart:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        return cudart

    return use


@pytest.mark.parametrize("size", [0, (1 << 20) + 1])
def test_page_locked_memory_has_the_exact_size_until_it_is_closed(use_cudart: Any, size: int) -> None:
    cudart = use_cudart(FakeCudart())
    memory = PinnedMemory(size)
    assert len(memory.tensor) == size and memory.tensor.dtype == torch.uint8
    assert cudart.registered == ({memory.tensor.data_ptr(): size} if size else {})
    assert memory.tensor.fill_(3).eq(3).all()
    memory.close()
    memory.close()
    assert not cudart.registered


def test_memory_that_cannot_be_page_locked_is_used_with_a_warning(
    use_cudart: Any, caplog: pytest.LogCaptureFixture
) -> None:
    use_cudart(FakeCudart(error=2))
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(100)
    assert "100 bytes of memory for checkpoints cannot be page-locked (CUDA error 2)" in caplog.text
    assert memory.tensor.fill_(3).eq(3).all()
    memory.close()


def test_the_thread_that_locks_memory_is_on_the_device_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[tuple[str, object]]()

    class Cudart(FakeCudart):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            calls.append((threading.current_thread().name, "lock"))
            return super().cudaHostRegister(address, size, flags)

    def bind(device: object) -> None:
        calls.append((threading.current_thread().name, device))

    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.accelerator, "set_device_index", bind)
    device = torch.device("cuda", 1)
    with fake_cuda():
        run = make_writer(tmp_path, comm=Comm(0, 1, 1, device))
        run.reserve({"x": torch.zeros(100)})
        run.close()
    thread = calls[0][0]
    assert thread.startswith("checkpoint")
    assert calls == [(thread, device), (thread, "lock")]


class _PinnedCopies(LateCopies):
    def allocate(self, size: int) -> HostMemory:
        return PinnedMemory(size)


def test_a_writer_locks_what_it_needs_and_unlocks_it_when_it_is_closed(
    use_cudart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = use_cudart(FakeCudart())
    monkeypatch.setattr(async_writer, "copies_from", lambda device: _PinnedCopies())
    run = make_writer(tmp_path)
    for step, size in ((1, 1000), (2, 5000), (3, 10)):  # the second needs more, the third reuses the memory
        run.save(step, {"x": torch.full((size,), float(step)), "rows": RankRows(torch.ones(3, 2), 0)}, {})
        assert sorted(cudart.registered.values()) == [24, 4 * max(size, 5000 * (step > 1))]
    run.close()
    assert not cudart.registered
    assert [load_tensors(tmp_path, step)["x"].unique().item() for step in (1, 2, 3)] == [1, 2, 3]


def test_a_save_holds_the_values_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that `until_update` names may change after `hold_updates`, all others at once."""
    monkeypatch.setattr(async_writer, "copies_from", lambda device: LateCopies())
    weight, buffer, rows = torch.ones(5), torch.ones(3), torch.ones(4, 2)
    run = make_writer(tmp_path)
    run.save(1, {"weight": weight, "buffer": buffer, "rows": RankRows(rows, 0)}, {}, until_update={"weight", "rows"})
    buffer.fill_(2)
    run.hold_updates()
    weight.fill_(2)
    rows.fill_(2)
    run.wait()
    run.close()
    found = {name: x.unique().tolist() for name, x in load_tensors(tmp_path).items()}
    assert found == {"weight": [1], "buffer": [1], "rows": [1]}


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.ema_decay=0.9", "objective=fastclip_v1"),  # with BatchNorm, an average and per-sample state
        pytest.param((*VIT, "precision=bf16", "optimizer=muon"), marks=pytest.mark.slow),  # with master weights
    ],
)
def test_a_step_changes_the_weights_only_after_they_are_copied(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are made at the last possible moment: directly before the next step's update."""
    late = LateCopies()
    monkeypatch.setattr(async_writer, "copies_from", lambda device: late)
    trainer = Trainer(small(tmp_path / "run", "duration=2st", *overrides))
    steps = trainer.steps()
    next(steps)
    trainer.learner.settle()  # as before a save
    expected = {
        name: (value.tensor if isinstance(value, RankRows) else value).clone()
        for name, value in trainer.learner.state.capture().items()
    }
    trainer._save({})
    assert late.waiting > 100, "the weights and the optimizer's state are copied during the step"
    next(steps)
    assert late.waiting == 0, "the step must hold its update until the copies are made"
    trainer.checkpoints.wait()
    now = trainer.learner.state.capture()
    trainer.close()
    found = tensors(tmp_path / "run", 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    changed = {
        name.split("/")[0]
        for name, value in now.items()
        if not torch.equal(value.tensor if isinstance(value, RankRows) else value, expected[name])
    }
    assert {"model", "optimizer"} <= changed
