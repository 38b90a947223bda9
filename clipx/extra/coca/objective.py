"""CoCa: the contrastive loss of the embeddings, and the next-token loss of each caption given its image."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, register
from clipx.errors import require
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

    contrastive_weight: float = 1.0
    """Weight of the contrastive loss (InfoNCE). At least 0. The reference is 1."""

    caption_weight: float = 2.0
    """Weight of the caption loss, the mean of -log p over all tokens of the global batch. Above 0: otherwise the
    decoder learns nothing. The reference is 2."""

    zero_minimum: ClassVar[bool] = True
    outputs: ClassVar[str | None] = CAPTION_LOSSES

    def __post_init__(self) -> None:
        LearnedTemperatureSpec.__post_init__(self)
        require(
            self.contrastive_weight >= 0,
            f"objective.contrastive_weight={self.contrastive_weight} must be at least 0: the reference is 1",
        )
        require(
            self.caption_weight > 0,
            f"objective.caption_weight={self.caption_weight} must be above 0, otherwise the decoder learns nothing: "
            "the reference is 2; to train without captions, choose model.kind=clip",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.extra.coca.captioning import Captioning
        from clipx.objective.losses.contrastive import in_batch

        temperature = self.build_temperature()
        weights = self.contrastive_weight, self.caption_weight
        return Captioning(comm, temperature, in_batch, self.tiling(comm, length), *weights)
