"""Options of the objectives that keep a moving average of each sample's normaliser (FCCO): γ and ε.

This module imports no torch: it is read at composition. What computes is in `losses/fcco.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Duration, Length
from clipx.config.registry import MISSING
from clipx.errors import ConfigError, require
from clipx.objective.spec import ObjectiveTraffic, TiledSpec

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective
    from clipx.objective.losses.fcco import Gamma
    from clipx.objective.losses.sample_state import SampleTable


class GammaSchedule(StrEnum):
    constant = "constant"  # minimum after the first epoch
    cosine = "cosine"  # from 1 down to minimum at decay
    fitted = "fitted"  # cosine over the whole run, to min(1, 4.177 · epochs^-0.7265): FastCLIP's successor


class TauGradient(StrEnum):
    exact = "exact"  # of the loss as it is defined
    official = "official"  # as FastCLIP's published code has it, which its published settings were tuned with


@dataclass(kw_only=True, slots=True)
class GammaSpec:
    """γ, the weight of the new estimate in a sample's moving average: 1 in the first epoch, in every schedule."""

    schedule: GammaSchedule = GammaSchedule.cosine
    minimum: float | None = None  # in (0, 1]
    decay: str | None = None  # when the minimum is reached: 18ep, or 50% of the run
    by_step: bool = False  # γ moves with every step; else at the start of each epoch, as FastCLIP's does

    def __post_init__(self) -> None:
        if self.schedule is GammaSchedule.fitted:
            require(self.minimum is None, f"objective.gamma.minimum={self.minimum} has no effect with schedule=fitted")
        elif self.minimum is None:
            raise ConfigError(f"objective.gamma.minimum has no value: schedule={self.schedule} needs one, e.g. 0.2")
        else:
            require(
                0 < self.minimum <= 1, f"objective.gamma.minimum={self.minimum} must lie in (0, 1]: 0.2 to 0.8 is usual"
            )
        if self.schedule is GammaSchedule.cosine:
            require(self.decay is not None, "objective.gamma.decay has no value: cosine needs one, e.g. 18ep or 50%")
            length = Duration.parse(str(self.decay), "objective.gamma.decay", share=True)
            require(length.value > 0, f"objective.gamma.decay={self.decay} must be above zero")
        else:
            require(
                self.decay is None,
                f"objective.gamma.decay={self.decay} has no effect with schedule={self.schedule}: leave it null",
            )
        require(
            not (self.by_step and self.schedule is GammaSchedule.constant),
            "objective.gamma.by_step=true has no effect with schedule=constant: leave it false",
        )

    def build(self, length: Length) -> Gamma:
        """γ over a run of `length`."""
        minimum, decay = self.minimum, float(length.total)
        if minimum is None:
            minimum = min(1.0, 4.177 * (length.total / length.epoch) ** -0.7265)
        elif self.decay is not None:
            decay = Duration.parse(self.decay, "objective.gamma.decay", share=True).samples(length)

        def gamma(samples_seen: int) -> float:
            if self.schedule is GammaSchedule.constant:
                return 1.0 if samples_seen < length.epoch else minimum
            at = samples_seen if self.by_step else samples_seen // length.epoch * length.epoch
            return minimum if at >= decay else 0.5 * (1 + math.cos(math.pi * at / decay)) * (1 - minimum) + minimum

        return gamma


@dataclass(kw_only=True, slots=True)
class FCCOSpec(TiledSpec):
    gamma: GammaSpec = MISSING
    eps: float = 1e-14  # ε, added to a normaliser before its logarithm
    indexed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        TiledSpec.__post_init__(self)
        require(self.eps >= 0, f"objective.eps={self.eps} is negative: 1e-14, or 1e-6 for large data, is usual")

    def parts(self, comm: Comm, length: Length, more_columns: int = 0) -> tuple[Comm, SampleTable, Gamma, float, int]:
        """What every one of these objectives is built of; the table has log u of both sides, and more."""
        from clipx.objective.losses.sample_state import SampleTable

        table = SampleTable(comm, length.epoch, 2 + more_columns)
        return comm, table, self.gamma.build(length), self.eps, self.tile_size(comm, length)


@dataclass(kw_only=True, slots=True)
class ConstantTemperatureSpec(FCCOSpec):
    """The global contrastive loss, τ ½mean[log(ε+g1) + log(ε+g2)] over the data set, at a constant temperature."""

    temperature: float = 0.07  # constant τ
    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, read=2, written=2, parameters=0)

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        check_temperature("temperature", self.temperature, 0.01)

    def fixed_temperature(self) -> tuple[float, str]:
        return self.temperature, f"the constant temperature {self.temperature:g} of objective={self.kind}"

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import GlobalFCCO, times_tau
        from clipx.objective.losses.temperature import ConstantTemperature

        return GlobalFCCO(*self.parts(comm, length), ConstantTemperature(self.temperature), times_tau)


@dataclass(kw_only=True, slots=True)
class SampleTemperatureSpec(FCCOSpec):
    """A temperature for each sample and side, kept and moved by an Adam of its own beside the sample's u."""

    init_temperature: float = 0.07
    min_temperature: float = 0.01
    temperature_lr: float = 0.0133
    temperature_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    temperature_eps: float = 1e-8
    rho: float = 7.0  # ρ, below log(samples - 1): larger for larger data
    tau_gradient: TauGradient = TauGradient.exact  # official: the step is divided by the second moment, not its root
    feature_gradient: TauGradient = TauGradient.exact  # official: without the factor τ_i that the loss has
    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=5, read=8, written=10, parameters=0)

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        check_temperature("min_temperature", self.min_temperature, 1e-3)
        check_temperature("init_temperature", self.init_temperature, self.min_temperature)
        require(self.temperature_lr > 0, f"objective.temperature_lr={self.temperature_lr} must be above 0")
        require(
            len(self.temperature_betas) == 2 and all(0 <= b < 1 for b in self.temperature_betas),
            f"objective.temperature_betas={self.temperature_betas} must be two numbers in [0, 1), e.g. [0.9,0.999]",
        )
        require(self.temperature_eps > 0, f"objective.temperature_eps={self.temperature_eps} must be above 0")

    def fixed_temperature(self) -> tuple[float, str]:
        tau = self.init_temperature
        return tau, f"objective={self.kind} has a temperature for each sample, which began at {tau:g}"

    def check(self, batch: int, samples: int | None) -> None:
        if samples is not None:
            check_rho(self.rho, samples, batch)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import IndividualFCCO
        from clipx.objective.losses.temperature import SampleTemperature

        self.check(length.batch, length.epoch)
        temperature = SampleTemperature(
            self.init_temperature,
            self.min_temperature,
            self.temperature_lr,
            self.temperature_betas,
            self.temperature_eps,
            rooted=self.tau_gradient is TauGradient.exact,
        )
        parts = self.parts(comm, length, temperature.columns)
        return IndividualFCCO(*parts, temperature, self.rho, weighted=self.feature_gradient is TauGradient.exact)


def check_temperature(key: str, value: float, minimum: float) -> None:
    require(
        minimum <= value <= 1,
        f"objective.{key}={value} must lie in [{minimum:g}, 1]: 0.07 is usual",
    )


def check_rho(rho: float, samples: int, batch: int) -> None:
    """The temperature is stationary where the mean KL of a row's softmax over its negatives from uniform is ρ."""
    limit, seen = (math.log(max(n - 1, 1)) for n in (samples, batch))
    require(
        rho < limit,
        f"objective.rho={rho} must be below log(samples - 1) = {limit:.4g} for {samples:,} samples: it is the KL from "
        "uniform at which the temperature settles, and no temperature reaches that one; take less, e.g. "
        f"{limit / 2:.2g} (a batch of {batch:,} by itself shows at most log(batch - 1) = {seen:.4g})",
    )
