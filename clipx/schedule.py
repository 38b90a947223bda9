"""Durations with units, cadences, and learning-rate schedules over samples seen.

One unit of progress, samples seen, so that nothing moves when the batch or the world size does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from clipx.config.duration import Duration, Length
from clipx.config.registry import MISSING, option
from clipx.errors import ConfigError, require

LearningRate = Callable[[int], float]
"""Samples seen before a step -> the learning rate of that step."""


@dataclass(kw_only=True, slots=True)
class ScheduleSpec:
    """The base of all schedules' options: each begins with a linear warm-up."""

    kind: str = MISSING
    warmup: str = "10000st"  # a duration, or a share of the run (5%): linear, from lr/warmup steps up to lr

    def __post_init__(self) -> None:
        Duration.parse(self.warmup, "schedule.warmup", share=True)

    def check(self, lr: float) -> None:
        """Raises ConfigError where the optimizer's `lr` does not go with this schedule."""

    def parts(self) -> dict[str, str]:
        """By key, the durations that follow each other within the run."""
        return {"schedule.warmup": self.warmup}

    def check_fits(self, duration: str, length: Length) -> None:
        """Raises ConfigError where the parts together are longer than the run of `duration`.

        At composition `length` has no epoch yet, and a part in another unit than the run passes.
        """
        whole = Duration.parse(duration, "duration")
        parts = {key: Duration.parse(text, key, share=True) for key, text in self.parts().items()}
        if sum(part.share(whole, length) or 0.0 for part in parts.values()) <= 1 + 1e-9:
            return
        named = " and ".join(f"{key}={text}" for key, text in self.parts().items())
        verb, what = ("are", "them") if len(parts) > 1 else ("is", "the warm-up")
        rule, limit = f"{verb} longer than", f"duration={duration}"
        if length.epoch:
            taken = sum(part.samples(length) for part in parts.values())
            rule, limit = f"{verb} {taken:,} samples, longer than", f"{limit} of {whole.samples(length):,}"
        raise ConfigError(f"{named} {rule} {limit}: shorten {what} or train longer")

    def build(self, lr: float, length: Length) -> LearningRate:
        """The learning rate over `length.total` samples."""
        warmup = Duration.parse(self.warmup, "schedule.warmup", share=True).samples(length)
        after = self.after(warmup, lr, length)
        return lambda seen: lr * min(1.0, (seen + length.batch) / warmup) if seen < warmup else after(seen)

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        """The learning rate from sample `warmup` on."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class DecayingSpec(ScheduleSpec):
    """A schedule that ends at a rate of its own."""

    min_lr: float = 0.0  # at the end of the run

    def __post_init__(self) -> None:
        ScheduleSpec.__post_init__(self)
        require(self.min_lr >= 0, f"schedule.min_lr={self.min_lr} is negative: give 0 or a small learning rate")

    def check(self, lr: float) -> None:
        require(self.min_lr <= lr, f"schedule.min_lr={self.min_lr} is above optimizer.lr={lr}: give at most {lr}")


@option("schedule")
@dataclass(kw_only=True, slots=True)
class CosineSpec(DecayingSpec):
    """Half a cosine from lr to min_lr after the warm-up (arXiv:1608.03983, no restarts)."""

    kind: str = "cosine"

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        span = max(1, length.total - warmup)

        def learning_rate(seen: int) -> float:
            return self.min_lr + (lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, (seen - warmup) / span)))

        return learning_rate


@option("schedule")
@dataclass(kw_only=True, slots=True)
class ConstantScheduleSpec(ScheduleSpec):
    """lr after the warm-up."""

    kind: str = "constant"

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        return lambda seen: lr


@option("schedule")
@dataclass(kw_only=True, slots=True)
class ConstantCooldownSpec(DecayingSpec):
    """lr after the warm-up, and at the end (1 - e/E)^power · (lr - min_lr) + min_lr, e of E samples into the cool-down
    (open_clip's const-cooldown; arXiv:2405.18392)."""

    kind: str = "constant_cooldown"
    cooldown: str = "20%"  # a duration, or a share of the run
    power: float = 1.0  # 1: linear; above it falls faster at first, below at last

    def __post_init__(self) -> None:
        DecayingSpec.__post_init__(self)
        Duration.parse(self.cooldown, "schedule.cooldown", share=True)
        require(self.power > 0, f"schedule.power={self.power} must be above 0: 1.0 is linear")

    def parts(self) -> dict[str, str]:
        return {**ScheduleSpec.parts(self), "schedule.cooldown": self.cooldown}

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        cooldown = Duration.parse(self.cooldown, "schedule.cooldown", share=True).samples(length)
        start = max(warmup, length.total - cooldown)
        span = max(1, length.total - start)

        def learning_rate(seen: int) -> float:
            left = 1 - min(1.0, max(0, seen - start) / span)
            return self.min_lr + (lr - self.min_lr) * math.pow(left, self.power)

        return learning_rate
