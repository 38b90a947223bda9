"""Options of SuperCLIP: InfoNCE, and the classification of an image by the tokens of its caption."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
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

    classification_weight: float = option(1.0, gt=0, hint="1 is usual; to train without the head: objective=infonce")
    """Weight of the classification loss. 1 is usual."""

    reads_trunk: ClassVar[bool] = True

    def build(self, comm: Comm, length: Length) -> Objective:
        """Returns the objective without its head; `prepare` creates the head when the model is known."""
        from clipx.extra.superclip.loss import SuperCLIP

        return SuperCLIP(comm, self.build_temperature(), self.tiling(comm, length), self.classification_weight)
