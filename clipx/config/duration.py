"""Durations and cadences in epochs, optimizer steps or samples."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
