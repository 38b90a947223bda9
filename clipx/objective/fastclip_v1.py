"""FastCLIP v1: the global contrastive loss with a constant temperature and a scheduled γ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config import option
from clipx.objective.fcco import FCCOSpec, check_temperature

if TYPE_CHECKING:
    from clipx.distributed import Comm
    from clipx.objective.base import Objective
    from clipx.schedule import Length


@option("objective")
@dataclass(kw_only=True, slots=True)
class FastCLIPv1Spec(FCCOSpec):
    """τ ½mean[log(ε+g1) + log(ε+g2)] over the data set (arXiv:2407.01445)."""

    kind: str = "fastclip_v1"
    temperature: float = 0.07  # constant τ

    def __post_init__(self) -> None:
        FCCOSpec.__post_init__(self)
        check_temperature("temperature", self.temperature, 0.01)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.moving_average import GlobalFCCO, times_tau
        from clipx.objective.temperature import ConstantTemperature

        return GlobalFCCO(*self.parts(comm, length), ConstantTemperature(self.temperature), times_tau)
