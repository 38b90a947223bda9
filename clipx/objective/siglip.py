"""SigLIP: binary classification of each pair as positive or negative, without a softmax over the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, register
from clipx.objective.spec import ObjectiveTraffic, SeveralCaptionsSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


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
