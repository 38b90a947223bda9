"""Options of SuperCLIP: InfoNCE, and the classification of an image by the tokens of its caption."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import frozen, register
from clipx.errors import require
from clipx.objective.spec import LearnedTemperatureSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@register("objective")
@frozen
class SuperClipSpec(LearnedTemperatureSpec):
    """InfoNCE + classification_weight · cross-entropy of a linear head on the pooled features of the image trunk
    against the distinct tokens of the caption, weighted by inverse document frequency (arXiv:2512.14480). Mean over B.
    """

    kind: str = "superclip"
    """Type of the objective; set by objective=superclip."""

    classification_weight: float = 1.0
    """Weight of the classification loss. Above 0: otherwise the head learns nothing. 1 is usual."""

    reads_trunk: ClassVar[bool] = True

    def __post_init__(self) -> None:
        LearnedTemperatureSpec.__post_init__(self)
        require(
            self.classification_weight > 0,
            f"objective.classification_weight={self.classification_weight} must be above 0, otherwise the head learns "
            "nothing: 1 is usual; to train without the head, choose objective=infonce",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        """Returns the objective without its head; `prepare` creates the head when the model is known."""
        from clipx.extra.superclip.loss import SuperCLIP

        return SuperCLIP(comm, self.build_temperature(), self.tiling(comm, length), self.classification_weight)
