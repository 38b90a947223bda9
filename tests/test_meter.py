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
        start = time.perf_counter()
        time.sleep(0.2)
        meter.paused(start)
    found = meter.read()
    assert found["data_wait_share"] > 0.5, "0.15 s of waiting; the 0.6 s of pauses are left out"
    assert found["samples_per_second"] > 600
