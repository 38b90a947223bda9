"""Base class of the options of the robust global contrastive loss with one temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.errors import require
from clipx.objective.fcco import FCCOSpec, check_positive_rho, check_rho, check_temperature, describe_rho
from clipx.objective.spec import ObjectiveTraffic

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.objective.losses.temperature import Temperature


@dataclass(kw_only=True, slots=True)
class RobustSpec(FCCOSpec):
    """τ (½mean[log(ε+g1) + log(ε+g2)] + ρ) over the data set; τ is learned and at least min_temperature."""

    init_temperature: float = 0.07
    """Initial temperature τ of all pairs; learned. In [min_temperature, 1]."""

    min_temperature: float = 0.01
    """Smallest temperature τ; clamped after each step. In [0.001, 1]."""

    temperature_lr: float = 2e-4
    """Learning rate of log 1/τ: constant, without warm-up or schedule; a third of it while τ ≤ 0.03. Above 0."""

    rho: float | None = None
    """ρ, the mean KL divergence from uniform of a row's softmax over its negatives at which the temperature converges.
    Above 0 and below log(samples - 1). null: computed from the number of samples n, min(6.5 (log n / 14.8)^3.2,
    0.8 log n): 0.6 for 1,000 samples. Published: 6.5 for 2.7 million, 8.5 for 9.2 million, 16 for 315 million."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, read=2, written=2)

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        check_temperature("min_temperature", self.min_temperature, 1e-3)
        check_temperature("init_temperature", self.init_temperature, self.min_temperature)
        require(
            self.temperature_lr > 0,
            f"objective.temperature_lr={self.temperature_lr} must be above 0: the default is 2e-4",
        )
        check_positive_rho(self.rho)

    def describe(self, length: Length) -> str:
        return f"{FCCOSpec.describe(self, length)}, {describe_rho(self.rho, length.epoch)}"

    def check(self, batch: int, samples: int | None) -> None:
        if samples is not None:
            check_rho(self.rho, samples, batch)

    def build_temperature(self) -> Temperature:
        """Returns the learned temperature of all pairs."""
        from clipx.objective.losses.temperature import GlobalTemperature

        return GlobalTemperature(self.init_temperature, 1 / self.min_temperature, slow=True)
