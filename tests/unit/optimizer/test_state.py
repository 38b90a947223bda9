"""Optimizer state survives a checkpoint for every optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.optimizers import OPTIONS, Optimizing
from helpers.runs import save_checkpoint
from torch import Tensor

from clipx.checkpoint.format import CheckpointDir
from clipx.checkpoint.state import add_prefix, load_optimizer, optimizer_tensors, select_prefix

RATES = [1e-3, 3e-3, 2e-3, 1e-3, 5e-4, 1e-4]


def save_and_load(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Saves the tensors in a checkpoint and loads them again."""
    save_checkpoint(folder, 3, tensors, keep_last=1)
    found = CheckpointDir(folder, lambda message: pytest.fail(message)).load()
    assert found is not None
    return dict(found.tensors)


def copy_through_checkpoint(source: Optimizing, target: Optimizing, folder: Path) -> None:
    """Copies weights and optimizer state into a new optimizer through a checkpoint, like the trainer."""
    tensors = {**add_prefix("weights", source.weights())}
    tensors |= add_prefix("optimizer", optimizer_tensors(source.optimizer))
    tensors = save_and_load(tensors, folder)
    weights = select_prefix("weights", tensors)
    with torch.no_grad():
        for name, p in target.named():
            p.copy_(weights[name])
    load_optimizer(target.optimizer, select_prefix("optimizer", tensors))


def assert_same(a: Optimizing, b: Optimizing) -> None:
    """Asserts that weights and all optimizer state are bit-identical."""
    theirs = b.weights()
    assert all(torch.equal(p, theirs[name]) for name, p in a.weights().items())
    state, other = optimizer_tensors(a.optimizer), optimizer_tensors(b.optimizer)
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype, name


@pytest.mark.parametrize("option", slow_except(OPTIONS, "adamw", "muon"))
def test_an_optimizer_resumes_from_a_checkpoint_bit_for_bit(option: str, tmp_path: Path) -> None:
    """State has the weight's memory format and type; step counts stay on the CPU, where reading them does not wait."""
    overrides = (f"optimizer={option}", "optimizer.layer_decay=0.7", "optimizer.text_lr_scale=0.5")
    through, stopped, resumed = (Optimizing(*overrides, dtype=torch.float32, constant=True) for _ in range(3))
    for step, lr in enumerate(RATES):
        through.step(step, lr)
    for step, lr in enumerate(RATES[:3]):
        stopped.step(step, lr)
    copy_through_checkpoint(stopped, resumed, tmp_path)
    assert_same(stopped, resumed)
    made = {name: stopped.optimizer.state[p] for name, p in stopped.named()}
    for name, p in resumed.named():
        state = resumed.optimizer.state[p]
        assert state.keys() == made[name].keys()
        for key, value in state.items():
            assert type(value) is type(made[name][key]), (name, key)
            if isinstance(value, Tensor):
                assert (value.dtype, value.stride()) == (made[name][key].dtype, made[name][key].stride()), (name, key)
    for a, b in zip(stopped.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert a.keys() - {"params"} == b.keys() - {"params"}
        assert a.get("step") == b.get("step") and type(a.get("step")) is type(b.get("step"))
    for step, lr in list(enumerate(RATES))[3:]:
        resumed.step(step, lr)
    assert_same(through, resumed)
