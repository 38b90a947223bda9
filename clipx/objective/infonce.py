"""InfoNCE over the global batch in both directions, the loss of CLIP and OpenCLIP, and its decoupled form."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, register
from clipx.objective.spec import LearnedTemperatureSpec, ObjectiveTraffic, SeveralCaptionsSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.data.spec import DataSpec
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@register("objective")
@frozen
class InfoNCESpec(SeveralCaptionsSpec):
    """Symmetric cross-entropy of the positive pair among all B (arXiv:2103.00020). Mean over B and both directions."""

    kind: str = "infonce"

    zero_minimum: ClassVar[bool] = True
    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3)
    open_clip_loss: ClassVar[str | None] = "ClipLoss"

    def has_zero_minimum(self, data: DataSpec) -> bool:
        # The cross entropy with a uniform target over n right captions is at least log n.
        return self.has_one_right_caption(data)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.positives import MultiPositive

        return MultiPositive(comm, self.build_temperature(), self.tiling(comm, length), self.same_caption)


@register("objective")
@frozen
class DCLSpec(LearnedTemperatureSpec):
    """½mean over B of (ℓr - pos) + (ℓc - pos) (arXiv:2110.06848). ℓ is the log-sum-exp over the negatives of a row.

    The gradient of a positive pair does not vanish as its softmax probability approaches 1.
    """

    kind: str = "dcl"

    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=3)

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.contrastive import Contrastive, negatives_only

        temperature = self.build_temperature()
        return Contrastive(comm, temperature, negatives_only, self.tiling(comm, length))
