"""Means over the steps of an interval, and shares of its time."""

from __future__ import annotations

import time

import pytest
import torch

from clipx.distributed import Comm
from clipx.meter import Meter


def test_an_interval_gives_means_and_starts_anew() -> None:
    meter = Meter(Comm(0, 2, 0, torch.device("cpu")))
    for value in (1.0, 3.0):
        meter.add({"loss": torch.tensor(value)}, samples=10)
    first = meter.read()
    assert first["loss"] == 2.0
    assert first["samples_per_second_per_device"] == pytest.approx(first["samples_per_second"] / 2)
    meter.add({"loss": torch.tensor(7.0)}, samples=10)
    assert meter.read()["loss"] == 7.0


def test_waiting_counts_and_pauses_do_not() -> None:
    def slow():
        for item in range(3):
            time.sleep(0.05)
            yield item

    meter = Meter(Comm(0, 1, 0, torch.device("cpu")))
    for _ in meter.waiting(slow()):
        meter.add({"loss": torch.tensor(0.0)}, samples=100)
        with meter.pausing():
            time.sleep(0.2)
    found = meter.read()
    assert found["data_wait_share"] > 0.5, "0.15 s of waiting; the 0.6 s of pauses are left out"
    assert found["samples_per_second"] > 600


def test_a_step_that_was_left_out_counts_its_samples_alone() -> None:
    meter = Meter(Comm(0, 1, 0, torch.device("cpu")))
    meter.add({"loss": torch.tensor(3.0)}, samples=10)
    meter.add({}, samples=10)
    found = meter.read()
    assert found["loss"] == 3.0
    meter.add({}, samples=10)
    assert "loss" not in meter.read()
