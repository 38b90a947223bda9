"""Options of the hinge loss on the hardest negative."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from clipx.config import Length, frozen, register
from clipx.distributed import Comm
from clipx.errors import require
from clipx.objective import ObjectiveSpec

if TYPE_CHECKING:
    from clipx.objective.base import Objective


@register("objective")
@frozen
class HardestNegativeSpec(ObjectiveSpec):
    """Hinge loss on the hardest negative of each image and text in the global batch (VSE++, arXiv:1707.05612)."""

    kind: str = "hardest_negative"
    """Type of the objective; set by objective=hardest_negative."""

    margin: float = 0.2
    """Margin in cosine similarity by which the matching pair must exceed the hardest negative. Above 0."""

    zero_minimum: ClassVar[bool] = True  # for debug=overfit

    def __post_init__(self) -> None:
        require(self.margin > 0, f"objective.margin={self.margin} must be above 0: 0.2 is usual")

    def build(self, comm: Comm, length: Length) -> Objective:
        from my_clipx.hardest_negative_loss import HardestNegative  # imports torch

        return HardestNegative(comm, self.margin)
