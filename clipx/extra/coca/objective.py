"""CoCa: the contrastive loss of the embeddings, and the next-token loss of each caption given its image."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.extra.coca.spec import CAPTION_LOSSES
from clipx.objective.spec import LearnedTemperatureSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@register("objective")
@frozen
class CoCaObjectiveSpec(LearnedTemperatureSpec):
    """contrastive_weight · InfoNCE + caption_weight · mean of -log p over the caption tokens of the global batch
    (arXiv:2205.01917, equation 4)."""

    kind: str = "coca"
    """Type of the objective; set by objective=coca. It needs a model with a decoder, e.g. model=coca_vit_b32."""

    contrastive_weight: float = option(1.0, ge=0, hint="the reference is 1")
    """Weight of the contrastive loss (InfoNCE). The reference is 1."""

    caption_weight: float = option(2.0, gt=0, hint="the reference is 2; model.kind=clip has no captions")
    """Weight of the caption loss, the mean of -log p over all tokens of the global batch: without it, the decoder
    learns nothing. The reference is 2."""

    zero_minimum: ClassVar[bool] = True
    outputs: ClassVar[str | None] = CAPTION_LOSSES

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.extra.coca.captioning import Captioning
        from clipx.objective.losses.contrastive import in_batch

        temperature = self.build_temperature()
        weights = self.contrastive_weight, self.caption_weight
        return Captioning(comm, temperature, in_batch, self.tiling(comm, length), *weights)
