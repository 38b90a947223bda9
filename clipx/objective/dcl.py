"""Decoupled contrastive learning: InfoNCE without the positive pair in the normaliser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import option
from clipx.objective.spec import LearnedTemperatureSpec, ObjectiveTraffic

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@option("objective")
@dataclass(kw_only=True, slots=True)
class DCLSpec(LearnedTemperatureSpec):
    """½mean over B of (ℓr - pos) + (ℓc - pos) (arXiv:2110.06848). ℓ is the log-sum-exp over the negatives of a row.

    The gradient of a positive pair does not vanish as its softmax probability approaches 1.
    """

    kind: str = "dcl"
    """Type of the objective; set by objective=dcl."""

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.contrastive import Contrastive, negatives_only

        temperature = self.build_temperature()
        return Contrastive(comm, temperature, negatives_only, self.tiling(comm, length))
