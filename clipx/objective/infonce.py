"""InfoNCE, the loss of CLIP and OpenCLIP, its decoupled form, and SigLIP, which has no softmax over the batch."""

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


@register("objective")
@frozen
class SigLIPSpec(SeveralCaptionsSpec):
    """-Σ_ij log σ(l_ij (α s_ij + β)) / B over all pairs, l = 1 for positives, -1 for negatives (arXiv:2303.15343)."""

    kind: str = "siglip"

    init_bias: float = -10.0
    """Initial bias β of all logits; learned. The default is near the log odds of a positive pair."""

    compiles_tiles: ClassVar[bool] = False  # its tiles are one fused expression
    one_temperature: ClassVar[bool] = False  # sigmoids
    zero_minimum: ClassVar[bool] = True
    traffic: ClassVar[ObjectiveTraffic | None] = ObjectiveTraffic(statistics=0, parameters=2)
    open_clip_loss: ClassVar[str | None] = "SigLipLoss"

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.losses.sigmoid import Sigmoid

        tiling = self.tiling(comm, length)
        return Sigmoid(comm, self.build_temperature(), self.init_bias, tiling, self.same_caption)
