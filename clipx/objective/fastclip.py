"""FastCLIP v0 to v3, SogCLR and iSogCLR: the global contrastive loss with a moving average of each normaliser (FCCO).

They differ in the temperature, which is constant, learned for all pairs or learned for each sample, and in the defaults
of γ. The losses are in `losses/fcco.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.objective.fcco import (
    FCCOSpec,
    GradientRule,
    check_rho,
    default_rho,
    describe_rho,
)
from clipx.objective.spec import ObjectiveTraffic, check_initial

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective
    from clipx.objective.losses.temperature import Temperature


@register("objective")
@frozen
class FastCLIPv0Spec(FCCOSpec):
    """½mean[log(ε+g1) + log(ε+g2)] over the data set; log 1/τ learned at the model's rate (arXiv:2407.01445)."""

    kind: str = "fastclip_v0"

    init_temperature: float = option(0.07, gt=0, le=1, hint="0.07 is usual")
    """Initial temperature τ of all pairs, at least 1/max_scale; log 1/τ is learned at the model's learning rate."""

    max_scale: float = option(100.0, gt=1, hint="the reference is 100")
    """Largest inverse temperature 1/τ; clamped after each step. The reference is 100."""

    tau_gradient: GradientRule = GradientRule.exact
    """Gradient of the temperature. exact: that of the loss as defined. official: that of FastCLIP's published code,
    with which its published settings were tuned: twice the exact one, which matters with SGD and with clipping."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, read=2, written=2)

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        check_initial(self.init_temperature, "1/max_scale", 1 / self.max_scale)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import GlobalFCCO, contrast_alone
        from clipx.objective.losses.temperature import GlobalTemperature

        temperature = GlobalTemperature(self.init_temperature, self.max_scale)
        kappa = self.tau_gradient.through_pairs
        return GlobalFCCO(*self.parts(comm, length), temperature, contrast_alone, kappa)


@frozen
class ConstantTemperatureSpec(FCCOSpec):
    """The global contrastive loss, τ ½mean[log(ε+g1) + log(ε+g2)] over the data set, at a constant temperature."""

    temperature: float = option(0.07, ge=0.01, le=1, hint="0.07 is usual")
    """Constant temperature τ; 0.07 is usual."""

    multiply_tau: bool = True
    """true: multiplies the loss by τ, as FastCLIP's paper does. false: the gradient is 1/τ times that, as in its
    published recipes, which AdamW cancels up to its eps."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, read=2, written=2, parameters=0)

    def fixed_temperature(self) -> tuple[float, str]:
        return self.temperature, f"the constant temperature {self.temperature:g} of objective={self.kind}"

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import GlobalFCCO, contrast_alone, times_tau
        from clipx.objective.losses.temperature import ConstantTemperature

        combine = times_tau if self.multiply_tau else contrast_alone
        return GlobalFCCO(*self.parts(comm, length), ConstantTemperature(self.temperature), combine)


@register("objective")
@frozen
class FastCLIPv1Spec(ConstantTemperatureSpec):
    """τ ½mean[log(ε+g1) + log(ε+g2)] over the data set (arXiv:2407.01445)."""

    kind: str = "fastclip_v1"


@register("objective")
@frozen
class SogCLRSpec(ConstantTemperatureSpec):
    """τ ½mean[log(ε+g1) + log(ε+g2)] over the data set (arXiv:2202.12387)."""

    kind: str = "sogclr"


@frozen
class RhoSpec(FCCOSpec):
    """Base class of the options of objectives whose learned temperature depends on ρ."""

    init_temperature: float = option(0.07, gt=0, le=1, hint="0.07 is usual")
    """Initial temperature τ of all pairs, or of each image and each text; learned. At least min_temperature."""

    min_temperature: float = option(0.01, ge=1e-3, le=1)
    """Smallest temperature τ; clamped after each step, or at each update."""

    temperature_lr: float = option(2e-4, gt=0)
    """Learning rate of the temperature: constant, without warm-up or schedule. Of one temperature of all pairs, the
    rate of log 1/τ, and a third of it while τ ≤ 0.03; published: 2e-4. Of a temperature for each sample, the rate of
    its Adam; published: 0.0133."""

    rho: float | None = option(None, gt=0, hint="6.5 is usual for 3 million samples")
    """ρ, the mean KL divergence from uniform of a row's softmax over its negatives at which the temperature converges.
    Below log(samples - 1). null: computed from the number of samples n, min(6.5 (log n / 14.8)^3.2, 0.8 log n): 0.6 for
    1,000 samples, 6.5 for 2.7 million. Published: 6.5 for 2.7 million, 8.5 for 9.2 million, 16 for 315 million; with a
    temperature for each sample 7 for 3 and 12 million."""

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        check_initial(self.init_temperature, "min_temperature", self.min_temperature)

    def describe(self, length: Length) -> str:
        return f"{FCCOSpec.describe(self, length)}, {describe_rho(self.rho, length.epoch)}"

    def check(self, batch: int, samples: int | None) -> None:
        if samples is not None:
            check_rho(self.rho, samples, batch)


@frozen
class SampleTemperatureSpec(RhoSpec):
    """The robust global contrastive loss with a temperature for each image and each text of the data set.

    A separate Adam updates the temperatures; its state is stored next to u in the per-sample table.
    """

    temperature_betas: list[float] = option([0.9, 0.999], length=2, ge=0, lt=1)
    """Decay rates of the first and second moment in the temperatures' Adam. Both are 0 in the first epoch."""

    temperature_eps: float = option(1e-8, gt=0)
    """Term added to the denominator in the temperatures' Adam."""

    feature_gradient: GradientRule = GradientRule.exact
    """Gradient of the embeddings. exact: that of the loss as defined. official: that of FastCLIP's published code, with
    which its published settings were tuned: without the factor τ_i of the loss."""

    one_temperature: ClassVar[bool] = False
    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=5, read=8, written=10, parameters=0)

    def fixed_temperature(self) -> tuple[float, str]:
        tau = self.init_temperature
        return tau, f"the initial temperature {tau:g} of objective={self.kind}, which learns one temperature per sample"

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
        )
        parts = self.parts(comm, length, temperature.columns)
        rho = self.rho or default_rho(length.epoch)
        return IndividualFCCO(*parts, temperature, rho, weighted=self.feature_gradient is GradientRule.exact)


@register("objective")
@frozen
class FastCLIPv2Spec(SampleTemperatureSpec):
    """½mean[τ1_i (log(ε+g1_i) + ρ) + τ2_i (log(ε+g2_i) + ρ)] over the data set (arXiv:2407.01445)."""

    kind: str = "fastclip_v2"


@register("objective")
@frozen
class ISogCLRSpec(SampleTemperatureSpec):
    """½mean[τ1_i (log(ε+g1_i) + ρ) + τ2_i (log(ε+g2_i) + ρ)] over the data set (arXiv:2305.11965)."""

    kind: str = "isogclr"


@frozen
class RobustSpec(RhoSpec):
    """τ (½mean[log(ε+g1) + log(ε+g2)] + ρ) over the data set; τ is learned and at least min_temperature."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, read=2, written=2)

    def build_temperature(self) -> Temperature:
        """Returns the learned temperature of all pairs."""
        from clipx.objective.losses.temperature import GlobalTemperature

        return GlobalTemperature(self.init_temperature, 1 / self.min_temperature, slow=True)


@register("objective")
@frozen
class FastCLIPv3Spec(RobustSpec):
    """τ (½mean[log(ε+g1) + log(ε+g2)] + ρ) over the data set; τ is learned and at least min_temperature
    (arXiv:2407.01445). τ converges to where the mean KL of a row's softmax over its negatives from uniform is ρ."""

    kind: str = "fastclip_v3"

    tau_gradient: GradientRule = GradientRule.exact
    """Gradient of the temperature. exact: that of the loss as defined. official: that of FastCLIP's published code,
    with which its published settings were tuned: twice the gradient through the pairs, and no ε in the gradient of the
    factor τ."""

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import GlobalFCCO, robust, robust_official

        self.check(length.batch, length.epoch)
        rho = self.rho or default_rho(length.epoch)
        combine = robust_official(rho) if self.tau_gradient is GradientRule.official else robust(rho)
        kappa = self.tau_gradient.through_pairs
        objective = GlobalFCCO(*self.parts(comm, length), self.build_temperature(), combine, kappa)
        objective.constant_lr = self.temperature_lr
        return objective
