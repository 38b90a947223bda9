"""Learning-rate schedules over samples seen.

Progress is counted in samples, so that the batch size and the world size do not shift a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from clipx.config.duration import Duration, Length, a_duration
from clipx.config.options import option
from clipx.config.registry import MISSING, frozen, register
from clipx.errors import ConfigError

LearningRate = Callable[[int], float]
"""Function from the samples seen before a step to the learning rate of that step."""

AUTO = "auto"
# The warm-up of `auto`: the shorter one. The reference recipe's steps, or a share of a run that is short for them.
_AUTO_WARMUP = (Duration(10_000, "st", AUTO), Duration(5, "%", AUTO))

Part = Sequence[Duration]
"""Phase of a schedule: durations with the same text, of which the shortest applies. Several for `auto`."""


def _samples(part: Part, length: Length) -> int:
    return min(duration.samples(length) for duration in part)


def _share(part: Part, whole: Duration, length: Length) -> float:
    """Returns a part as a share of `whole`, the run's duration. 0 if it needs `length.epoch`, which is unknown."""
    shares = [duration.share(whole, length) for duration in part]
    return min((share for share in shares if share is not None), default=0.0)


def _check_warmup(key: str, text: str) -> None:
    if text != AUTO:
        a_duration(share=True, zero=True)(key, text)


@frozen
class ScheduleSpec:
    """Base of the learning-rate schedules. Each begins with a linear warm-up."""

    kind: str = MISSING
    """Name of the schedule. Set by the option: schedule=cosine, schedule=constant, …"""

    warmup: str = option(AUTO, check=_check_warmup)
    """Length of the linear warm-up from lr / (warm-up steps) to lr: a duration (10000st, 1ep, 1e6sa) or a share of the
    run (5%). 0st: none. auto: 10,000 steps, at most 5% of the run. Warm-up and cool-down together are at most as long
    as the run."""

    def parts(self) -> dict[str, Part]:
        """Returns the parsed phases of the schedule by key; together they fit into the run. Raises ConfigError."""
        key, text = "schedule.warmup", self.warmup
        return {key: _AUTO_WARMUP if text == AUTO else (Duration.parse(text, key, share=True),)}

    def check_fits(self, whole: Duration, length: Length) -> None:
        """Raises ConfigError if the parts together are longer than `whole`, the run's duration.

        At composition `length.epoch` is unknown; a part that needs it is then not counted.
        """
        parts = self.parts()
        if sum(_share(part, whole, length) for part in parts.values()) <= 1 + 1e-9:
            return
        named = " and ".join(f"{key}={part[0].text}" for key, part in parts.items())
        verb, what = ("are", "them") if len(parts) > 1 else ("is", "the warm-up")
        rule, limit = f"{verb} longer than", f"duration={whole.text}"
        if length.epoch:
            taken = sum(_samples(part, length) for part in parts.values())
            rule, limit = f"{verb} {taken:,} samples, longer than", f"{limit} of {whole.samples(length):,}"
        raise ConfigError(f"{named} {rule} {limit}: shorten {what} or train longer")

    def describe(self, length: Length) -> str:
        """Returns the lengths of the parts in a run of `length` as text for the log."""
        parts = [self.kind]
        for key, part in self.parts().items():
            samples, name = _samples(part, length), key.removeprefix("schedule.")
            share = f"{100 * samples / length.total:.3g} % of the run"
            parts.append(f"{name}={part[0].text}: {samples:,} samples = {samples / length.batch:,.4g} steps = {share}")
        return "; ".join(parts)

    def build(self, lr: float, length: Length) -> LearningRate:
        """Returns the learning rate as a function of samples seen, for a run of `length.total` samples."""
        warmup = _samples(self.parts()["schedule.warmup"], length)
        after = self.after(warmup, lr, length)
        return lambda seen: lr * min(1.0, (seen + length.batch) / warmup) if seen < warmup else after(seen)

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        """Returns the learning rate as a function of samples seen, from sample `warmup` on."""
        raise NotImplementedError


@frozen
class DecayingSpec(ScheduleSpec):
    """Base of the schedules that decay to a final learning rate."""

    min_lr: float = option(0.0, ge=0)
    """Learning rate at the end of the run, at most optimizer.lr."""


@register("schedule")
@frozen
class CosineSpec(DecayingSpec):
    """Half a cosine from lr to min_lr after the warm-up (arXiv:1608.03983, without restarts)."""

    kind: str = "cosine"

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        span = max(1, length.total - warmup)

        def learning_rate(seen: int) -> float:
            return self.min_lr + (lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, (seen - warmup) / span)))

        return learning_rate


@register("schedule")
@frozen
class ConstantScheduleSpec(ScheduleSpec):
    """Constant learning rate after the warm-up."""

    kind: str = "constant"

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        return lambda seen: lr


@register("schedule")
@frozen
class ConstantCooldownSpec(DecayingSpec):
    """Constant learning rate after the warm-up, then a cool-down (open_clip's const-cooldown; arXiv:2405.18392).

    After e of the E samples of the cool-down the learning rate is (1 - e/E)^power · (lr - min_lr) + min_lr.
    """

    kind: str = "constant_cooldown"

    cooldown: str = option("20%", check=a_duration(share=True, zero=True))
    """Length of the cool-down at the end of the run: a duration (10000st, 1ep, 1e6sa) or a share of the run. 20% is the
    length that arXiv:2405.18392 finds to match a cosine. Warm-up and cool-down together are at most as long as the
    run."""

    power: float = option(1.0, gt=0, hint="1.0 is linear")
    """Exponent of the cool-down. 1: linear. Above 1 the learning rate falls faster at first, below 1 at the end."""

    def parts(self) -> dict[str, Part]:
        key = "schedule.cooldown"
        return {**ScheduleSpec.parts(self), key: (Duration.parse(self.cooldown, key, share=True),)}

    def after(self, warmup: int, lr: float, length: Length) -> LearningRate:
        cooldown = _samples(self.parts()["schedule.cooldown"], length)
        start = max(warmup, length.total - cooldown)
        span = max(1, length.total - start)

        def learning_rate(seen: int) -> float:
            left = 1 - min(1.0, max(0, seen - start) / span)
            return self.min_lr + (lr - self.min_lr) * math.pow(left, self.power)

        return learning_rate
