"""NeuCLIP: the robust global contrastive loss with a network that predicts each sample's normaliser."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import Duration, Length, a_duration
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx.objective.fastclip import check_rho, default_rho, describe_rho
from clipx.objective.spec import ObjectiveTraffic, TiledSpec, check_initial

if TYPE_CHECKING:
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@register("objective")
@frozen
class NeuCLIPSpec(TiledSpec):
    """τ (½mean[exp(-a)(ε+g) + a - 1] + ρ) over both sides, where learned prototypes predict a ≈ log(ε+g) from the
    embedding (arXiv:2511.08417). It needs no sample indices: a stream and replacement=true are possible."""

    kind: str = "neuclip"

    init_temperature: float = option(0.07, gt=0, le=1, hint="0.07 is usual")
    """Initial temperature τ of all pairs, at least min_temperature; learned."""

    min_temperature: float = option(0.01, ge=1e-3, le=1)
    """Smallest temperature τ; clamped after each step."""

    temperature_lr: float = option(2e-4, gt=0)
    """Learning rate of log 1/τ: constant, without warm-up or schedule; a third of it while τ ≤ 0.03."""

    rho: float | None = option(None, gt=0, hint="6.5 is usual for 3 million samples")
    """ρ, the mean KL divergence from uniform of a row's softmax over its negatives at which the temperature converges.
    Below log(samples - 1). null: computed from the number of samples n, min(6.5 (log n / 14.8)^3.2, 0.8 log n): 0.6 for
    1,000 samples. FastCLIP's published values: 6.5 for 2.7 million, 8.5 for 9.2 million."""

    eps: float = option(1e-14, ge=0)
    """ε, added to a normaliser before its logarithm."""

    prototypes: int = option(4096, ge=1, hint="4096 is usual")
    """m, the number of prototypes for the images and for the texts, each of the width of an embedding. The paper has
    4096."""

    updates: int = option(10, ge=0, hint="10 is usual")
    """Updates of the prototypes in a step, before the gradient of the embeddings. 0 leaves the embeddings that
    `restart` stored. The paper has 10."""

    prototype_lr: float = option(1e-3, gt=0)
    """Learning rate of AdaGrad, which updates the prototypes: constant."""

    restart: str | None = option("500st", check=a_duration())
    """Duration after which embeddings of the following batches replace all prototypes: 500st (steps) or 1e6sa
    (samples); at least the samples that replace all. null: only in the first steps of the run. The paper has 500
    steps."""

    clip: float = option(5.0, gt=0)
    """Largest log(ε+g) - a of a sample: a is raised to log(ε+g) - clip, so that a row's weights sum to at most
    exp(clip) where the prediction is far below the batch's estimate."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, prototypes=4096, updates=10, summed=2)

    def __post_init__(self) -> None:
        TiledSpec.__post_init__(self)
        check_initial(self.init_temperature, "min_temperature", self.min_temperature)
        duration = self.restart_duration
        steps = duration is None or duration.unit != "ep"
        require(steps, f"objective.restart={self.restart} must be in steps or samples, e.g. 500st")

    @property
    def restart_duration(self) -> Duration | None:
        """The parsed `restart`."""
        return None if self.restart is None else Duration.parse(self.restart, "objective.restart")

    def describe(self, length: Length) -> str:
        return describe_rho(self.rho, length.epoch)

    def check(self, batch: int, samples: int | None) -> None:
        if samples is not None:
            check_rho(self.rho, samples, batch)

    def restart_samples(self, batch: int) -> int | None:
        """Returns the number of samples between two restarts, which replace a prototype by each; None without
        restarts."""
        duration = self.restart_duration
        return None if duration is None else max(duration.samples(Length(epoch=0, batch=batch)), self.prototypes)

    def exchanged(self) -> ObjectiveTraffic | None:
        return ObjectiveTraffic(statistics=3, prototypes=self.prototypes, updates=self.updates, summed=2)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.extra.successors.neural_normaliser import NeuCLIP
        from clipx.objective.losses.temperature import GlobalTemperature

        self.check(length.batch, length.epoch)
        temperature = GlobalTemperature(self.init_temperature, 1 / self.min_temperature, slow=True)
        rho = self.rho or default_rho(length.epoch)
        objective = NeuCLIP(comm, self.tiling(comm, length), temperature, rho, self, self.restart_samples(length.batch))
        objective.constant_lr = self.temperature_lr
        return objective
