"""Monitors report a problem once, as long as its cause lasts."""

from __future__ import annotations

from typing import Any

import torch

from clipx.objective.base import Objective
from clipx.objective.losses.temperature import GlobalTemperature
from clipx.trainer.monitors import AT_LIMIT_STEPS, Monitors


class Scored(Objective):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = GlobalTemperature(0.07, max_scale=100.0)

    def set(self, log_scale: float) -> None:
        with torch.no_grad():
            self.temperature.log_scale.fill_(log_scale)
            self.temperature.after_step()


def test_a_temperature_at_its_limit_is_reported_once_until_it_leaves() -> None:
    reported: list[tuple[str, Any]] = []
    objective = Scored()
    monitors = Monitors(objective, lambda kind, **facts: reported.append((kind, facts["step"])))
    monitors.check(0, {})
    objective.set(50.0)  # the optimizer pushes far beyond 100
    for step in range(100, 100 + 2 * AT_LIMIT_STEPS, 100):
        monitors.check(step, {})
    assert reported == [("temperature_at_limit", 100 + AT_LIMIT_STEPS)]
    objective.set(1.0)
    monitors.check(5000, {})
    objective.set(-1.0)  # the lower end is a limit too
    monitors.check(6000, {})
    monitors.check(6000 + AT_LIMIT_STEPS, {})
    assert [step for _, step in reported] == [100 + AT_LIMIT_STEPS, 6000 + AT_LIMIT_STEPS]
