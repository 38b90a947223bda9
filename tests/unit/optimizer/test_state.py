"""Optimizer state survives a checkpoint for every optimizer, and every optimizer trains."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.optimizers import OPTIONS, Optimizing
from helpers.runs import SMALL, run, save_checkpoint, small
from torch import Tensor

from clipx.checkpoint.format import CheckpointDir
from clipx.checkpoint.state import add_prefix, load_optimizer, optimizer_tensors, select_prefix
from clipx.errors import CheckpointError
from clipx.trainer.trainer import Trainer

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


@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.float64], torch.float32))
@pytest.mark.parametrize("option", slow_except(OPTIONS, "adamw", "muon"))
def test_an_optimizer_resumes_from_a_checkpoint_bit_for_bit(option: str, dtype: torch.dtype, tmp_path: Path) -> None:
    overrides = (f"optimizer={option}", "optimizer.layer_decay=0.7", "optimizer.text_lr_scale=0.5")
    through, stopped, resumed = (Optimizing(*overrides, dtype=dtype, constant=True) for _ in range(3))
    for step, lr in enumerate(RATES):
        through.step(step, lr)
    for step, lr in enumerate(RATES[:3]):
        stopped.step(step, lr)
    copy_through_checkpoint(stopped, resumed, tmp_path)
    assert_same(stopped, resumed)
    for step, lr in list(enumerate(RATES))[3:]:
        resumed.step(step, lr)
    assert_same(through, resumed)


@pytest.mark.parametrize("option", slow_except(OPTIONS, "adamw", "muon"))
def test_a_checkpoint_does_not_depend_on_the_groups(option: str, tmp_path: Path) -> None:
    """A run may resume with other layer-wise rates: the state is stored per parameter."""
    stopped = Optimizing(f"optimizer={option}")
    resumed = Optimizing(f"optimizer={option}", "optimizer.layer_decay=0.5", "optimizer.no_decay=[text.blocks.*]")
    for step, lr in enumerate(RATES[:3]):
        stopped.step(step, lr)
    copy_through_checkpoint(stopped, resumed, tmp_path)
    assert len(resumed.groups) != len(stopped.groups)
    assert_same(stopped, resumed)


@pytest.mark.parametrize("option", OPTIONS)
def test_loaded_state_keeps_type_dtype_and_memory_format(option: str, tmp_path: Path) -> None:
    """State has the weight's memory format and type; step counts stay on the CPU, where reading them does not wait."""
    stopped, resumed = (Optimizing(f"optimizer={option}", dtype=torch.float32) for _ in range(2))
    stopped.step(0, 1e-3)
    copy_through_checkpoint(stopped, resumed, tmp_path)
    made = {name: stopped.optimizer.state[p] for name, p in stopped.named()}
    for name, p in resumed.named():
        state = resumed.optimizer.state[p]
        assert state.keys() == made[name].keys()
        for key, value in state.items():
            assert type(value) is type(made[name][key]), (name, key)
            if isinstance(value, Tensor):
                assert (value.dtype, value.stride()) == (made[name][key].dtype, made[name][key].stride()), (name, key)
    for a, b in zip(stopped.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert {key: value for key, value in a.items() if key != "params"}.keys() == b.keys() - {"params"}
        assert a.get("step") == b.get("step") and type(a.get("step")) is type(b.get("step"))


def test_plain_numbers_in_optimizer_state_keep_value_and_type(tmp_path: Path) -> None:
    """User-defined optimizers may store plain numbers."""
    one, other = (torch.optim.SGD([("w", torch.nn.Parameter(torch.ones(2)))], lr=0.1) for _ in range(2))
    kept = {"steps": 7, "scale": 0.1, "warm": True, "mean": torch.arange(2.0), "count": torch.tensor(3)}
    one.state[one.param_groups[0]["params"][0]] = kept
    one.param_groups[0]["step"] = 12
    load_optimizer(other, save_and_load(optimizer_tensors(one), tmp_path))
    state = other.state[other.param_groups[0]["params"][0]]
    assert state.keys() == kept.keys()
    for key in ("steps", "scale", "warm"):
        assert state[key] == kept[key] and type(state[key]) is type(kept[key])
    assert torch.equal(state["mean"], torch.arange(2.0)) and state["count"].item() == 3
    assert other.param_groups[0]["step"] == 12


@pytest.mark.parametrize("option", slow_except(["lamb", "muon", "lion", "sgd"], "lamb"))
def test_a_run_resumes_bit_for_bit_with_every_optimizer(option: str, tmp_path: Path) -> None:
    """Same test as tests/unit/trainer/test_trainer.py has for AdamW, with a drop of the rate and clipping."""
    overrides = (f"optimizer={option}", "optimizer.clip_norm=1.0", "schedule=constant_cooldown", "checkpoint.every=2st")
    ends = []
    for _ in range(2):
        trainer = Trainer(small(tmp_path / "run", *overrides, "schedule.warmup=1st", "resume=auto"))
        assert trainer.steps_done == 2 * len(ends)
        trainer.fit()
        found = CheckpointDir(tmp_path / "run" / "checkpoints", pytest.fail).load(4)
        assert found is not None
        ends.append(dict(found.tensors))
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")  # simulates a run stopped after two steps
    assert ends[0].keys() == ends[1].keys()
    assert not [name for name, tensor in ends[0].items() if not torch.equal(tensor, ends[1][name])]


def test_resuming_with_another_optimizer_raises_an_error(tmp_path: Path) -> None:
    Trainer(small(tmp_path / "run", "duration=2st")).fit()
    with pytest.raises(
        CheckpointError, match=r"belongs to another run \(optimizer.kind: adamw -> lion\): resume it with"
    ):
        Trainer(small(tmp_path / "run", "resume=auto", "optimizer=lion"))
    assert Trainer(small(tmp_path / "run", "resume=auto", "optimizer=adamw_convnet")).steps_done == 2


@pytest.mark.slow
def test_every_optimizer_trains_from_the_command_line(tmp_path: Path) -> None:
    """Trains 16 steps on 256 images at each optimizer's default rate: the loss is finite and falls."""
    options = ["adamw", "lamb", "lion", "muon", "sgd"]
    steps = ("duration=16st", "checkpoint=none", f"hydra.sweep.dir={tmp_path}")
    run(sys.executable, "-m", "clipx.train", "-m", f"optimizer={','.join(options)}", *SMALL, *steps)
    for number, option in enumerate(options):
        lines = (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()
        losses = torch.tensor([json.loads(line)["train/loss"] for line in lines], dtype=torch.float64)
        assert len(losses) == 16 and losses.isfinite().all(), option
        assert losses[-4:].mean() < losses[:4].mean() - 0.3, (option, losses)
