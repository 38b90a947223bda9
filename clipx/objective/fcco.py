"""Options of the objectives with a moving average of each sample's normaliser (FCCO): γ and ε.

This module imports no torch, since composition imports it. The losses are in `losses/fcco.py`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Duration, Length, a_duration
from clipx.config.options import option
from clipx.config.registry import MISSING, complete, frozen
from clipx.errors import require
from clipx.objective.spec import TiledSpec

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.objective.losses.contrastive import Tiling
    from clipx.objective.losses.fcco import Gamma
    from clipx.objective.losses.sample_state import SampleTable


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
