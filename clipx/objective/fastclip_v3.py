"""FastCLIP v3: the robust global contrastive loss with one learned temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config.registry import option
from clipx.objective.fcco import GradientRule, default_rho
from clipx.objective.robust import RobustSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@option("objective")
@dataclass(kw_only=True, slots=True)
class FastCLIPv3Spec(RobustSpec):
    """τ (½mean[log(ε+g1) + log(ε+g2)] + ρ) over the data set; τ is learned and at least min_temperature
    (arXiv:2407.01445). τ converges to where the mean KL of a row's softmax over its negatives from uniform is ρ."""

    kind: str = "fastclip_v3"
    """Type of the objective; set by objective=fastclip_v3."""

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
