"""Saving and restoring the state of random number generators."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import VIT, small

from clipx.trainer import state
from clipx.trainer.rng import rng_state, set_rng_state
from clipx.trainer.trainer import Trainer

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(3).tolist()  # noqa: NPY002


def test_every_generator_continues_from_the_restored_state() -> None:
    draw()
    state = rng_state(CPU).clone()
    random.gauss(0, 1)  # caches a second number every other time
    assert len(rng_state(CPU)) == len(state)
    set_rng_state(state, CPU)
    assert state.dtype == torch.uint8
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert draw() != expected[0]
    set_rng_state(state, CPU)
    assert [draw(), draw()] == expected


def test_a_checkpoint_of_another_type_of_device_is_resumed_with_new_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's generator adds its own bytes to the state, and a checkpoint may move between CPU and CUDA."""
    with monkeypatch.context() as patched:
        patched.setattr(
            state, "rng_state", lambda device: torch.cat([rng_state(device), torch.zeros(16, dtype=torch.uint8)])
        )
        Trainer(small(tmp_path / "run", *VIT, "duration=2st", "checkpoint.every=1st")).fit()
    again = Trainer(small(tmp_path / "run", *VIT, "duration=3st", "checkpoint.every=1st", "resume=auto"))
    assert any("another type of device than cpu wrote the checkpoint" in note for note in again.notes)
    again.fit()
    assert again.steps_done == 3
