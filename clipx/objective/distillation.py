"""InfoNCE, distillation of a teacher's softmax over the batch into the student's, and distance of the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx.objective.spec import LearnedTemperatureSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@register("objective")
@frozen
class DistillationSpec(LearnedTemperatureSpec):
    """contrastive_weight · InfoNCE + distill_weight · cross-entropy of the student's softmax under the teacher's
    (arXiv:1503.02531) + embedding_weight · cosine distance of the student's embeddings from the teacher's. Mean over B
    and both directions. The group `teacher` names the teacher."""

    kind: str = "distillation"

    contrastive_weight: float = option(1.0, ge=0, hint="0 learns from the teacher alone")
    """Weight of the contrastive loss (InfoNCE). 0: learn from the teacher alone."""

    distill_weight: float = option(1.0, ge=0)
    """Weight of the distillation loss, the cross-entropy between the softmaxes of teacher and student over the batch.
    Above 0 without embedding_weight."""

    embedding_weight: float = option(0.0, ge=0, hint="0 disables it")
    """Weight of 1 - the cosine of each embedding and the teacher's, mean over images and texts. Above 0 the teacher
    must have the embed_dim of the model. With the start of fine-tuning as teacher it preserves its
    embeddings. 0: off."""

    taught: ClassVar[bool] = True
    untaught: ClassVar[str | None] = "infonce"

    def __post_init__(self) -> None:
        LearnedTemperatureSpec.__post_init__(self)
        require(
            self.distill_weight > 0 or self.embedding_weight > 0,
            f"objective.distill_weight={self.distill_weight} must be above 0: to train without a teacher, choose "
            "objective=infonce; 0 is valid with objective.embedding_weight above 0",
        )

    @property
    def teacher_logits(self) -> bool:
        return self.distill_weight > 0

    def check_teacher(self, widths: Sequence[int], width: int) -> None:
        other = [w for w in widths if w != width]
        require(
            not other or not self.embedding_weight,
            f"objective.embedding_weight={self.embedding_weight:g} compares embeddings of the same width, and the "
            f"teacher's is {', '.join(map(str, other))}, not model.embed_dim={width}: give a teacher of this width, or "
            "remove it",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.distillation import Distillation

        temperature = self.build_temperature()
        weights = self.contrastive_weight, self.distill_weight
        return Distillation(comm, temperature, weights, self.embedding_weight, self.tiling(comm, length))
