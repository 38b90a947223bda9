"""Durations with units, cadences, and learning-rate schedules over samples seen.

One unit of progress, samples seen, so that nothing moves when the batch or the world size does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from clipx.config import MISSING, option
from clipx.errors import ConfigError, require

_LONGEST = 1e15  # of any unit: above it float64 no longer counts one by one


@dataclass(frozen=True, slots=True)
class Length:
    """What durations are measured by, in samples: an epoch, an optimizer step, and the run (0 where not known yet)."""

    epoch: int
    batch: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training with its unit: `32ep`, `10000st`, `12.8e9sa`."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str, key: str) -> Duration:
        """Raises ConfigError naming `key`, the value, the rule and examples."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*(ep|st|sa)\s*", text)
        if found is None:
            raise ConfigError(
                f"{key}={text} is not a duration: give a number and its unit, "
                "e.g. 32ep (epochs), 10000st (optimizer steps) or 12.8e9sa (samples)"
            )
        value = float(found[1])
        require(value <= _LONGEST, f"{key}={text} is too long: give at most {_LONGEST:g}{found[2]}")
        return cls(value, found[2])

    def samples(self, length: Length) -> int:
        """Samples in this duration."""
        return round(self.value * {"ep": length.epoch, "st": length.batch, "sa": 1}[self.unit])


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often something happens: every so many samples, only at the end, or never."""

    period: int | None  # samples; None: not during training
    at_end: bool

    @classmethod
    def parse(cls, text: str, key: str, length: Length) -> Cadence:
        """`none`, `end`, or a duration (which happens at the end as well). Raises ConfigError."""
        if text in ("none", "end"):
            return cls(None, text == "end")
        period = Duration.parse(text, f"{key} (or none, or end)").samples(length)
        require(period > 0, f"{key}={text} is no time at all: give a duration above zero, end, or none")
        return cls(period, True)

    def due(self, before: int, after: int) -> bool:
        """Whether a multiple of the period lies in the samples (before, after]."""
        return self.period is not None and after // self.period > before // self.period


def check_cadence(text: str, key: str) -> None:
    """The part of `Cadence.parse` that needs no data: called at composition."""
    Cadence.parse(text, key, Length(1 << 40, 1 << 20))


LearningRate = Callable[[int], float]
"""Samples seen before a step -> the learning rate of that step."""


@dataclass(kw_only=True, slots=True)
class ScheduleSpec:
    kind: str = MISSING
    warmup: str = "10000st"  # linear, from lr/warmup steps up to lr

    def __post_init__(self) -> None:
        Duration.parse(self.warmup, "schedule.warmup")

    def check(self, lr: float) -> None:
        """Raises ConfigError where the optimizer's `lr` does not go with this schedule."""

    def build(self, lr: float, length: Length) -> LearningRate:
        """The learning rate over `length.total` samples."""
        raise NotImplementedError


@option("schedule")
@dataclass(kw_only=True, slots=True)
class CosineSpec(ScheduleSpec):
    """Half a cosine from lr to min_lr after the warm-up (arXiv:1608.03983, no restarts)."""

    kind: str = "cosine"
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        ScheduleSpec.__post_init__(self)
        require(self.min_lr >= 0, f"schedule.min_lr={self.min_lr} is negative: give 0 or a small learning rate")

    def check(self, lr: float) -> None:
        require(self.min_lr <= lr, f"schedule.min_lr={self.min_lr} is above optimizer.lr={lr}: give at most {lr}")

    def build(self, lr: float, length: Length) -> LearningRate:
        warmup = Duration.parse(self.warmup, "schedule.warmup").samples(length)
        span = max(1, length.total - warmup)

        def learning_rate(seen: int) -> float:
            if seen < warmup:
                return lr * min(1.0, (seen + length.batch) / warmup)
            return self.min_lr + (lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, (seen - warmup) / span)))

        return learning_rate


@option("schedule")
@dataclass(kw_only=True, slots=True)
class ConstantSpec(ScheduleSpec):
    """lr after the warm-up."""

    kind: str = "constant"

    def build(self, lr: float, length: Length) -> LearningRate:
        warmup = Duration.parse(self.warmup, "schedule.warmup").samples(length)
        return lambda seen: lr * min(1.0, (seen + length.batch) / warmup) if warmup else lr
