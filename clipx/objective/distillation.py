"""InfoNCE and distillation of a teacher's softmax over the batch into the student's."""

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
    (arXiv:1503.02531). Mean over B and both directions. The group `teacher` names the teacher."""

    kind: str = "distillation"
    """Type of the objective; set by objective=distillation. It needs teacher.weights=… or teacher.embeddings=…"""

    contrastive_weight: float = 1.0
    """Weight of the contrastive loss (InfoNCE). At least 0. 0: learn from the teacher alone."""

    distill_weight: float = 1.0
    """Weight of the distillation loss, the cross-entropy between the softmaxes of teacher and student over the batch.
    Above 0."""

    taught: ClassVar[bool] = True
    untaught: ClassVar[str | None] = "infonce"

    def __post_init__(self) -> None:
        LearnedTemperatureSpec.__post_init__(self)
        require(
            self.contrastive_weight >= 0,
            f"objective.contrastive_weight={self.contrastive_weight} must be at least 0: 0 learns from the teacher "
            "alone",
        )
        require(
            self.distill_weight > 0,
            f"objective.distill_weight={self.distill_weight} must be above 0: to train without a teacher, choose "
            "objective=infonce",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.distillation import Distillation

        temperature = self.build_temperature()
        weights = self.contrastive_weight, self.distill_weight
        return Distillation(comm, temperature, weights, self.tiling(comm, length))
