"""DRRho-CLIP: the robust global contrastive loss on pair losses minus those of a reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require_effect
from clipx.objective.fastclip import FCCOSpec, GradientRule, RobustSpec, default_rho
from clipx.objective.spec import ObjectiveTraffic, TemperatureRule

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective
    from clipx.objective.losses.temperature import Temperature


@register("objective")
@frozen
class DRRhoCLIPSpec(RobustSpec):
    """FastCLIP v3's loss of the similarities minus those of a reference model (arXiv:2505.06699). The group `teacher`
    names the reference, of which only the similarities are used: it may be smaller than the model."""

    kind: str = "drrho_clip"

    temperature: TemperatureRule = TemperatureRule.learned
    """Rule of the temperature. learned: as in fastclip_v3. constant: τ is init_temperature in the whole run, and ρ has
    no effect; the published recipe has 0.01."""

    tau_gradient: GradientRule = option(GradientRule.exact, when="temperature == learned")
    """Gradient of a learned temperature. exact: that of the loss as defined. official: that of DRRho-CLIP's published
    code: the gradient through the pairs counts 2B/(B-1) times, and the other term uses log u of a mean over B instead
    of B-1 negatives."""

    taught: ClassVar[bool] = True
    untaught: ClassVar[str | None] = "fastclip_v3"
    traffic: ClassVar[ObjectiveTraffic | None] = None  # depends on the width of the reference's embeddings

    def __post_init__(self) -> None:
        RobustSpec.__post_init__(self)
        for name, default in (("rho", None), ("temperature_lr", 2e-4)):
            learned = self.temperature is TemperatureRule.learned or getattr(self, name) == default
            require_effect(learned, f"objective.{name}={getattr(self, name)}", "with objective.temperature=constant")

    @property
    def teacher_logits(self) -> bool:
        return False

    def describe(self, length: Length) -> str:
        described = RobustSpec if self.temperature is TemperatureRule.learned else FCCOSpec
        return described.describe(self, length)

    def check(self, batch: int, samples: int | None) -> None:
        if self.temperature is TemperatureRule.learned:
            RobustSpec.check(self, batch, samples)

    def fixed_temperature(self) -> tuple[float, str]:
        tau = self.init_temperature
        return tau, f"the constant temperature {tau:g} of objective={self.kind}"

    def build_temperature(self) -> Temperature:
        from clipx.objective.losses.temperature import ConstantTemperature

        if self.temperature is TemperatureRule.constant:
            return ConstantTemperature(self.init_temperature)
        return RobustSpec.build_temperature(self)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import DRRhoCLIP, robust, times_tau

        self.check(length.batch, length.epoch)
        learned, rho = self.temperature is TemperatureRule.learned, self.rho or default_rho(length.epoch)
        objective = DRRhoCLIP(
            *self.parts(comm, length), self.build_temperature(), robust(rho) if learned else times_tau
        )
        objective.constant_lr = self.temperature_lr if learned else None
        objective.official_rho = rho if self.tau_gradient is GradientRule.official else None
        return objective
