"""Saving and restoring the state of random number generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from clipx.trainer.rng import rng_state, set_rng_state

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
