"""InfoNCE, and a teacher's softmax over the batch as what the student's is to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import option
from clipx.errors import require
from clipx.objective.spec import LearnedTemperatureSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@option("objective")
@dataclass(kw_only=True, slots=True)
class DistillationSpec(LearnedTemperatureSpec):
    """contrastive_weight · InfoNCE + distill_weight · cross-entropy of the student's softmax under the teacher's
    (arXiv:1503.02531). Mean over B and both directions. The teacher is the part `teacher` of the run."""

    kind: str = "distillation"
    contrastive_weight: float = 1.0  # 0: from the teacher alone
    distill_weight: float = 1.0
    taught: ClassVar[bool] = True

    def __post_init__(self) -> None:
        LearnedTemperatureSpec.__post_init__(self)
        require(
            self.contrastive_weight >= 0,
            f"objective.contrastive_weight={self.contrastive_weight} is negative: give 0, for the teacher alone, or "
            "more",
        )
        require(
            self.distill_weight > 0,
            f"objective.distill_weight={self.distill_weight} must be above 0: to train without a teacher, choose "
            "objective=infonce",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.distillation import Distillation
        from clipx.objective.losses.temperature import GlobalTemperature

        temperature = GlobalTemperature(self.init_temperature, self.max_scale)
        weights = self.contrastive_weight, self.distill_weight
        return Distillation(comm, temperature, weights, self.tile_size(comm, length))
