"""Random numbers go on where they were."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from clipx.rng import rng_state, set_rng_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(3).tolist()  # noqa: NPY002


def test_every_generator_goes_on_after_a_trip_through_json() -> None:
    draw()
    tensors, plain = rng_state(CPU)
    plain = json.loads(json.dumps(plain))
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert draw() != expected[0]
    set_rng_state(tensors, plain, CPU)
    assert [draw(), draw()] == expected
