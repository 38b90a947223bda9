"""Monitors report a problem once, as long as its cause lasts."""

from __future__ import annotations

from typing import Any

import torch

from clipx.data.spec import DataSpec
from clipx.objective.base import Objective
from clipx.objective.losses.temperature import GlobalTemperature
from clipx.trainer.metrics import AT_LIMIT_STEPS, Monitors


def test_a_temperature_at_its_limit_is_reported_once_until_it_leaves() -> None:
    reported: list[tuple[str, Any]] = []
    objective = Objective()
    objective.temperature = GlobalTemperature(0.07, max_scale=100.0)
    monitors = Monitors(objective, lambda kind, **facts: reported.append((kind, facts["step"])), DataSpec(name="x"))
    # The optimizer pushes far beyond 100, back, and below the lower end.
    for log_scale, steps in ((50.0, (100, 600, 1100, 1600, 2100, 2600)), (1.0, (5000,)), (-1.0, (6000, 7000, 8000))):
        with torch.no_grad():
            objective.temperature.log_scale.fill_(log_scale)
            objective.temperature.after_step()
        for step in steps:
            monitors.check(step, {})
    assert reported == [("temperature_at_limit", first + AT_LIMIT_STEPS) for first in (100, 6000)]
