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
    """A length of training with its unit: `32ep`, `10000st`, `12.8e9sa`; where it is part of a run also `50%` of it."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str, key: str, share: bool = False) -> Duration:
        """`share`: whether `%` of the run is one. Raises ConfigError naming `key`, the value, the rule and examples."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)\s*(ep|st|sa|%)\s*", text)
        if found is None or (found[2] == "%" and not share):
            examples = f"32ep (epochs), 10000st (optimizer steps){', 20% (of the run)' if share else ''}"
            raise ConfigError(
                f"{key}={text} is not a duration{' here' if found else ''}: give a number and its unit, "
                f"e.g. {examples} or 12.8e9sa (samples)"
            )
        value = float(found[1])
        longest = 100 if found[2] == "%" else _LONGEST
        require(value <= longest, f"{key}={text} is too long: give at most {longest:g}{found[2]}")
        return cls(value, found[2])

    def samples(self, length: Length) -> int:
        """Samples in this duration."""
        return round(self.value * {"ep": length.epoch, "st": length.batch, "sa": 1, "%": length.total / 100}[self.unit])

    def share(self, whole: Duration, length: Length) -> float | None:
        """This duration as a share of the run, whose own is `whole`. None: not known, where `length.epoch` is not."""
        if self.unit == "%":
            return self.value / 100
        if self.unit == whole.unit:
            return self.value / whole.value
        if not length.epoch and "ep" in (self.unit, whole.unit):
            return None
        samples = {"ep": length.epoch, "st": length.batch, "sa": 1}
        return self.value * samples[self.unit] / (whole.value * samples[whole.unit])


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often something happens: every so many samples or seconds, only at the end, or never."""

    period: int | None  # samples; None: not by them
    at_end: bool
    seconds: float | None = None  # None: not by the clock

    @classmethod
    def parse(cls, text: str, key: str, length: Length, clock: bool = False) -> Cadence:
        """`none`, `end`, or a duration (which happens at the end as well); with `clock` also minutes, `30min`.

        Raises ConfigError.
        """
        if text in ("none", "end"):
            return cls(None, text == "end")
        if clock and (found := re.fullmatch(r"(\d+(?:\.\d*)?)min", text)):
            require(float(found[1]) > 0, f"{key}={text} is no time at all: give minutes above zero, end, or none")
            return cls(None, True, 60 * float(found[1]))
        others = f"none, or end{', or minutes as 30min' if clock else ''}"
        period = Duration.parse(text, f"{key} (or {others})").samples(length)
        require(period > 0, f"{key}={text} is no time at all: give a duration above zero, end, or none")
        return cls(period, True)

    def due(self, before: int, after: int) -> bool:
        """Whether a multiple of the period lies in the samples (before, after]."""
        return self.period is not None and after // self.period > before // self.period


def check_cadence(text: str, key: str, clock: bool = False) -> None:
    """The part of `Cadence.parse` that needs no data: called at composition."""
    Cadence.parse(text, key, Length(1 << 40, 1 << 20), clock)


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
class FallingSpec(ScheduleSpec):
    """A schedule that ends at a rate of its own."""

    min_lr: float = 0.0  # at the end of the run

    def __post_init__(self) -> None:
        ScheduleSpec.__post_init__(self)
        require(self.min_lr >= 0, f"schedule.min_lr={self.min_lr} is negative: give 0 or a small learning rate")

    def check(self, lr: float) -> None:
        require(self.min_lr <= lr, f"schedule.min_lr={self.min_lr} is above optimizer.lr={lr}: give at most {lr}")


@option("schedule")
@dataclass(kw_only=True, slots=True)
class CosineSpec(FallingSpec):
    """Half a cosine from lr to min_lr after the warm-up (arXiv:1608.03983, no restarts)."""

    kind: str = "cosine"

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        span = max(1, length.total - warmup)

        def learning_rate(seen: int) -> float:
            return self.min_lr + (lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, (seen - warmup) / span)))

        return learning_rate


@option("schedule")
@dataclass(kw_only=True, slots=True)
class ConstantSpec(ScheduleSpec):
    """lr after the warm-up."""

    kind: str = "constant"

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        return lambda seen: lr


@option("schedule")
@dataclass(kw_only=True, slots=True)
class ConstantCooldownSpec(FallingSpec):
    """lr after the warm-up, and at the end (1 - e/E)^power · (lr - min_lr) + min_lr, e of E samples into the cool-down
    (open_clip's const-cooldown; arXiv:2405.18392)."""

    kind: str = "constant_cooldown"
    cooldown: str = "20%"  # a duration, or a share of the run
    power: float = 1.0  # 1: linear; above it falls faster at first, below at last

    def __post_init__(self) -> None:
        FallingSpec.__post_init__(self)
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
