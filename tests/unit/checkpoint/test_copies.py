"""Copies to staging memory: page-locked memory has the exact size, and updates wait for copies from a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.runs import small, tensors
from helpers.savers import LateCopies, load_tensors, make_writer

from clipx.checkpoint import async_writer
from clipx.checkpoint.copies import HostMemory, PinnedMemory
from clipx.checkpoint.tensors import RankRows
from clipx.trainer.trainer import Trainer


class FakeCudart:
    """Records the memory that is registered with CUDA."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class _PinnedCopies(LateCopies):
    def allocate(self, size: int) -> HostMemory:
        return PinnedMemory(size)


def test_a_writer_locks_what_it_needs_and_unlocks_it_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
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


def test_a_step_changes_the_weights_only_after_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are made at the last possible moment: directly before the next step's update."""
    overrides = ("optimizer.ema_decay=0.9", "objective=fastclip_v1")  # with BatchNorm and per-sample state
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
