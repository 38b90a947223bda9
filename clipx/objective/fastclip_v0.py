"""FastCLIP v0: the global contrastive loss without its factor τ, with a learned temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import option
from clipx.errors import require
from clipx.objective.fcco import FCCOSpec, GradientRule, check_temperature
from clipx.objective.spec import ObjectiveTraffic

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@option("objective")
@dataclass(kw_only=True, slots=True)
class FastCLIPv0Spec(FCCOSpec):
    """½mean[log(ε+g1) + log(ε+g2)] over the data set; log 1/τ learned at the model's rate (arXiv:2407.01445)."""

    kind: str = "fastclip_v0"
    """Type of the objective; set by objective=fastclip_v0."""

    init_temperature: float = 0.07
    """Initial temperature τ of all pairs; log 1/τ is learned at the model's learning rate. In [1/max_scale, 1]."""

    max_scale: float = 100.0
    """Largest inverse temperature 1/τ; clamped after each step. Above 1. The reference is 100."""

    tau_gradient: GradientRule = GradientRule.exact
    """Gradient of the temperature. exact: that of the loss as defined. official: that of FastCLIP's published code,
    with which its published settings were tuned: twice the exact one, which matters with SGD and with clipping."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3, read=2, written=2)

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        require(self.max_scale > 1, f"objective.max_scale={self.max_scale} must be above 1: the reference is 100")
        check_temperature("init_temperature", self.init_temperature, 1 / self.max_scale)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.fcco import GlobalFCCO, contrast_alone
        from clipx.objective.losses.temperature import GlobalTemperature

        temperature = GlobalTemperature(self.init_temperature, self.max_scale)
        kappa = self.tau_gradient.through_pairs
        return GlobalFCCO(*self.parts(comm, length), temperature, contrast_alone, kappa)
