"""Monitors that report a suspicious state of a run without stopping it. Checked when metrics are logged."""

from __future__ import annotations

from collections.abc import Callable

import torch

from clipx.data.spec import DataSpec
from clipx.logger import Row
from clipx.objective.base import Objective
from clipx.objective.losses.temperature import GlobalTemperature
from clipx.trainer.compile import recompile_limit_hits

AT_LIMIT_STEPS = 1000  # steps at the limit before a temperature is reported
LARGE_LOG_U = 20.0  # mean of log u: negatives score e^20 times as high as positives, on average over an interval


class Monitors:
    """Calls `event(kind, message=…, step=…)` once for each alarm while its cause lasts."""

    def __init__(self, objective: Objective, event: Callable[..., None], data: DataSpec) -> None:
        self._temperatures = [m for m in objective.modules() if isinstance(m, GlobalTemperature)]
        self._event, self._data = event, data
        self._since: int | None = None  # the step at which a temperature was first seen at its limit
        self._reported: set[str] = set()
        self._hits = recompile_limit_hits()  # of earlier runs of this process

    def check(self, step: int, row: Row) -> None:
        """Checks the current state of the objective and the means since the last log. `row`: the logged metrics."""
        limit = bool(self._temperatures) and bool(torch.stack([t.at_limit() for t in self._temperatures]).any())
        self._since = None if not limit else step if self._since is None else self._since
        stayed = 0 if self._since is None else step - self._since
        self._alarm(
            "temperature_at_limit",
            stayed >= AT_LIMIT_STEPS,
            step,
            f"the temperature has been at its limit for {stayed:,} steps: usual late in a run; early in a run, lower "
            "optimizer.lr",
        )
        self._alarm(
            "recompile_limit",
            recompile_limit_hits() > self._hits,
            step,
            "a compiled function has more variants than torch._dynamo.config.recompile_limit, and further ones run "
            "uncompiled: TORCH_LOGS=recompiles logs their causes",
        )
        log_u = row.get("train/log_u", 0.0)
        self._alarm(
            "large_u",
            log_u > LARGE_LOG_U,
            step,
            f"log u is {log_u:.3g} on average: negatives score far above positives; lower optimizer.lr",
        )

        alarm = self._data.repeated_captions(row.get("train/repeated_captions", 0.0))
        self._alarm("repeated_captions", bool(alarm), step, alarm)

    def _alarm(self, kind: str, on: bool, step: int, message: str) -> None:
        if on and kind not in self._reported:
            self._reported.add(kind)
            self._event(kind, step=step, message=message)
        elif not on:
            self._reported.discard(kind)
