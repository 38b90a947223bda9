"""FastCLIP v0 to v3, SogCLR and iSogCLR: the global contrastive loss with a moving average of each normaliser (FCCO).

They differ in the temperature, which is constant, learned for all pairs or learned for each sample, and in the defaults
of γ. The losses are in `losses/fcco.py`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Duration, Length, a_duration
from clipx.config.options import option
from clipx.config.registry import MISSING, complete, frozen, register
from clipx.errors import require
from clipx.objective.spec import ObjectiveTraffic, TiledSpec, check_initial

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective
    from clipx.objective.losses.contrastive import Tiling
    from clipx.objective.losses.fcco import Gamma
    from clipx.objective.losses.sample_state import SampleTable
    from clipx.objective.losses.temperature import Temperature


_FORGETS = 0.95  # γ above which an average is nearly the estimate of its batch


class GammaSchedule(StrEnum):
    """Schedules of γ."""

    constant = "constant"
    cosine = "cosine"
    fitted = "fitted"

    @property
    def defaults(self) -> tuple[float | None, str | None]:
        """Returns the default `minimum` and `decay`. None: the schedule has no such option."""
        return {"constant": (0.6, None), "cosine": (0.2, "50%"), "fitted": (None, None)}[self]


class GradientRule(StrEnum):
    """Variants of a gradient of the objectives that learn a temperature."""

    exact = "exact"
    official = "official"

    @property
    def through_pairs(self) -> float:
        """Factor of the gradient with respect to a global α through the pairs.

        The official code scores each pair once as a row and once as a column, and both scores differentiate α.
        """
        return 2.0 if self is GradientRule.official else 1.0


@frozen
class GammaSpec:
    """γ, the weight of the new estimate in a sample's moving average. 1 in the first epoch, unless by_step=true."""

    schedule: GammaSchedule = GammaSchedule.fitted
    """Course of γ. constant: 1 in the first epoch, minimum after it. cosine: from 1 to minimum at decay, constant from
    there. fitted: a cosine over the whole run from 1 to min(1, 4.177 · epochs^-0.7265), the rule of FastCLIP's
    successor."""

    minimum: float | None = option(None, gt=0, le=1, when="schedule != fitted", hint="0.2 to 0.8 is usual")
    """Final γ; 0.2 to 0.8 is usual. null: 0.2 with schedule=cosine, 0.6 with constant."""

    decay: str | None = option(None, check=a_duration(share=True), when="schedule == cosine")
    """Duration after which schedule=cosine reaches minimum: 18ep (epochs), 10000st (steps), 1e9sa (samples) or 50% (of
    the run). null: 50%."""

    by_step: bool = option(False, when="schedule != constant")
    """true: update γ at each step. false: at the start of each epoch, as FastCLIP does."""

    def __post_init__(self) -> None:
        # Stored, so that a saved configuration holds the values and does not depend on later defaults.
        for name, default in zip(("minimum", "decay"), self.schedule.defaults, strict=True):
            if getattr(self, name) is None:
                complete(self, **{name: default})

    @property
    def decay_duration(self) -> Duration | None:
        """The parsed `decay`."""
        return None if self.decay is None else Duration.parse(self.decay, "objective.gamma.decay", share=True)

    def lowest(self, length: Length) -> float:
        """Returns the final γ of a run of `length`."""
        if self.minimum is not None:
            return self.minimum
        epochs = max(length.total, 1) / length.epoch  # a total of 0 is not known yet
        return float(min(1.0, 4.177 * epochs**-0.7265))

    def last(self, length: Length) -> float:
        """Returns the γ of the last step of a run of `length`."""
        return self.build(length)(max(length.total - length.batch, 0))

    def caution(self, length: Length) -> str | None:
        """Returns what to give if γ hardly leaves 1, though no such minimum was given. None if it does."""
        once, last = length.total <= length.epoch, self.last(length)
        if not (once or last > _FORGETS) or (self.minimum or 0) > _FORGETS:
            return None
        if once:
            fix = "in one epoch no sample has an earlier estimate, train longer for a memory"
        elif self.schedule is GammaSchedule.cosine:
            fix = "for a memory give an earlier objective.gamma.decay, e.g. 50%"
        else:
            fix = (
                "that is the rule for up to 7 epochs; for a memory give objective.gamma.schedule=cosine "
                "objective.gamma.minimum=0.8 (published: 0.2 to 0.8)"
            )
        return f"γ ends at {last:.3g}, so u has no memory of earlier batches, as in dcl: {fix}"

    def build(self, length: Length) -> Gamma:
        """Returns γ as a function of the samples seen, for a run of `length`."""
        minimum, duration = self.lowest(length), self.decay_duration
        decay = length.total if duration is None else duration.samples(length)

        def gamma(samples_seen: int) -> float:
            if self.schedule is GammaSchedule.constant:
                return 1.0 if samples_seen < length.epoch else minimum
            at = samples_seen if self.by_step else samples_seen // length.epoch * length.epoch
            return minimum if at >= decay else 0.5 * (1 + math.cos(math.pi * at / decay)) * (1 - minimum) + minimum

        return gamma


@frozen
class FCCOSpec(TiledSpec):
    """Options of the objectives with a moving average of each sample's normaliser (FCCO)."""

    gamma: GammaSpec = MISSING
    """Schedule of γ, the weight of the new estimate in a sample's moving average, e.g.
    {schedule: cosine, minimum: 0.2, decay: 50%}."""

    eps: float = option(1e-14, ge=0, hint="1e-14 is usual, 1e-6 for large data")
    """ε, added to a normaliser before its logarithm. 1e-14 is usual, 1e-6 for large data."""

    indexed: ClassVar[bool] = True

    def describe(self, length: Length) -> str:
        return f"γ from 1 to {self.gamma.last(length):.3g} ({self.gamma.schedule})"

    def caution(self, length: Length) -> str | None:
        found = self.gamma.caution(length)
        return None if found is None else f"objective={self.kind}: {found}"

    def parts(
        self, comm: Comm, length: Length, more_columns: int = 0
    ) -> tuple[Comm, SampleTable, Gamma, float, Tiling]:
        """Returns the arguments that all FCCO objectives share: communicator, table, γ, ε and tiling.

        The table has two columns for log u of image and text, and `more_columns`.
        """
        from clipx.objective.losses.sample_state import SampleTable

        table = SampleTable(comm, length.epoch, 2 + more_columns)
        return comm, table, self.gamma.build(length), self.eps, self.tiling(comm, length)


def default_rho(samples: int) -> float:
    """Returns the ρ of a data set of n samples: min(6.5 (log n / 14.8)^3.2, 0.8 log n).

    The power law is within 4 % of FastCLIP's three published values (arXiv:2407.01445): 6.5, 8.5 and 16 for 2.7, 9.2
    and 315 million samples. It also gives the small values that runs on 1,000 to 12,000 samples need
    (docs/benchmarks/fastclip.md).
    """
    size = math.log(max(samples, 2))
    return float(min(6.5 * (size / 14.8) ** 3.2, 0.8 * size))


def describe_rho(rho: float | None, samples: int) -> str:
    """Returns ρ for the log, with its origin if it is computed."""
    return f"ρ = {rho:g}" if rho is not None else f"ρ = {default_rho(samples):.3g} for {samples:,} samples"


def check_rho(rho: float | None, samples: int, batch: int) -> None:
    """Raises ConfigError where no temperature is stationary.

    The temperature is stationary where the mean KL of a row's softmax over its negatives from uniform is ρ.
    """
    if rho is None:
        return
    limit, seen = (math.log(max(n - 1, 1)) for n in (samples, batch))
    require(
        rho < limit,
        f"objective.rho={rho} must be below log(samples - 1) = {limit:.4g} for {samples:,} samples: it is the KL from "
        f"uniform at which the temperature converges, and no temperature reaches {rho}; remove it, for "
        f"{default_rho(samples):.2g} (one batch of {batch:,} shows at most log(batch - 1) = {seen:.4g})",
    )


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
