"""Copies to staging memory: page-locked memory has the exact size, and updates wait for copies from a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.runs import small, tensors
from helpers.savers import LateCopies, load_tensors, make_writer

from clipx.checkpoint import async_writer
from clipx.checkpoint.tensors import RankRows
from clipx.trainer.trainer import Trainer


def test_a_save_holds_the_values_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that `until_update` names may change after `hold_updates`, all others at once."""
    monkeypatch.setattr(async_writer, "copies_from", lambda device: LateCopies())
    weight, buffer, rows = torch.ones(5), torch.ones(3), torch.ones(4, 2)
    run = make_writer(tmp_path)
    values = {"overdue": ["one"]}
    run.save(
        1, {"weight": weight, "buffer": buffer, "rows": RankRows(rows, 0)}, values, until_update={"weight", "rows"}
    )
    buffer.fill_(2)
    values["overdue"].append("two")
    run.hold_updates()
    weight.fill_(2)
    rows.fill_(2)
    run.wait()
    run.close()
    found = {name: x.unique().tolist() for name, x in load_tensors(tmp_path).items()}
    assert found == {"weight": [1], "buffer": [1], "rows": [1]}
    assert json.loads((tmp_path / "step-00000001" / "state.json").read_text())["state"] == {"overdue": ["one"]}


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
