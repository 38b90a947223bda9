"""Durations and cadences in epochs, optimizer steps or samples."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from clipx.errors import ConfigError, require

_LONGEST = 1e15  # in any unit: float64 does not represent all integers above 9e15


@dataclass(frozen=True, slots=True)
class Length:
    """Number of samples of an epoch, of an optimizer step and of the run, to convert durations. 0: not known yet."""

    epoch: int
    batch: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Duration:
    """Length of training with its unit: `32ep`, `10000st`, `12.8e9sa`. For a part of a run also a share: `50%`.

    `text`: as typed, for errors and logs.
    """

    value: float
    unit: str
    text: str

    @classmethod
    def parse(cls, text: str, key: str, share: bool = False) -> Duration:
        """Parses a duration. `share`: whether `%` of the run is allowed. Raises ConfigError, which names `key`."""
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
        return cls(value, found[2], text)

    def samples(self, length: Length) -> int:
        """Returns the number of samples in this duration."""
        return round(self.value * {"ep": length.epoch, "st": length.batch, "sa": 1, "%": length.total / 100}[self.unit])

    def share(self, whole: Duration, length: Length) -> float | None:
        """Returns this duration as a share of `whole`, the run's. None: it needs `length.epoch`, which is unknown."""
        if self.unit == "%":
            return self.value / 100
        if self.unit == whole.unit:
            return self.value / whole.value
        if not length.epoch and "ep" in (self.unit, whole.unit):
            return None
        samples = {"ep": length.epoch, "st": length.batch, "sa": 1}
        return self.value * samples[self.unit] / (whole.value * samples[whole.unit])


def a_duration(share: bool = False, zero: bool = False) -> Callable[[str, str], None]:
    """Returns the `check` of an option whose text is a duration. `share`: as for `Duration.parse`; `zero`: may be 0."""

    def check(key: str, text: str) -> None:
        value = Duration.parse(text, key, share).value
        require(value > 0 or zero, f"{key}={text} must be above zero, e.g. 32ep, 10000st{' or 50%' if share else ''}")

    return check


def a_cadence(clock: bool = False) -> Callable[[str, str], object]:
    """Returns the `check` of an option whose text is a cadence. `clock`: as for `Cadence.parse`."""
    return lambda key, text: Cadence.parse(text, key, clock)


@dataclass(frozen=True, slots=True)
class Interval:
    """A cadence in a run of known length: a number of samples or seconds, only the end of the run, or never."""

    period: int | None  # samples; None: no interval in samples
    at_end: bool
    seconds: float | None = None  # None: no interval in seconds

    def due(self, before: int, after: int) -> bool:
        """Returns whether a multiple of the period is in the samples (before, after]."""
        return self.period is not None and after // self.period > before // self.period


@dataclass(frozen=True, slots=True)
class Cadence:
    """Interval of a repeated action, as typed: `none`, `end`, a duration, or minutes."""

    text: str
    period: Duration | None = None  # None: no interval in samples
    seconds: float | None = None  # None: no interval in seconds

    @classmethod
    def parse(cls, text: str, key: str, clock: bool = False) -> Cadence:
        """Parses `none`, `end`, or a duration, which includes the end of the run; with `clock` also minutes, `30min`.

        Raises ConfigError.
        """
        if text in ("none", "end"):
            return cls(text)
        if clock and (found := re.fullmatch(r"(\d+(?:\.\d*)?)min", text)):
            require(float(found[1]) > 0, f"{key}={text} must be above zero: give minutes above zero, end, or none")
            return cls(text, seconds=60 * float(found[1]))
        others = f"none, or end{', or minutes as 30min' if clock else ''}"
        cadence = cls(text, Duration.parse(text, f"{key} (or {others})"))
        cadence.on(Length(1 << 40, 1 << 20), key)  # the number of samples is not known yet
        return cadence

    def on(self, length: Length, key: str) -> Interval:
        """Returns the interval in a run of `length`. Raises ConfigError, which names `key`."""
        period = None if self.period is None else self.period.samples(length)
        require(
            period is None or period > 0,
            f"{key}={self.text} is less than one sample: give a longer duration, end, or none",
        )
        return Interval(period, self.text != "none", self.seconds)
