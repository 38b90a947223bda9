"""InfoNCE over the global batch, both directions, as CLIP trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config import option
from clipx.errors import require
from clipx.objective import ObjectiveSpec

if TYPE_CHECKING:
    from clipx.distributed import Comm
    from clipx.objective.base import Objective
    from clipx.schedule import Length


@option("objective")
@dataclass(kw_only=True, slots=True)
class InfoNCESpec(ObjectiveSpec):
    """Symmetric cross-entropy of the right pair among all B (arXiv:2103.00020). Mean over B and both directions."""

    kind: str = "infonce"
    init_temperature: float = 0.07
    max_scale: float = 100.0  # largest inverse temperature
    tile: int = 1024  # columns scored at a time: memory grows with local batch x tile

    def __post_init__(self) -> None:
        require(self.tile >= 1, f"objective.tile={self.tile} must be at least 1")
        require(self.max_scale > 1, f"objective.max_scale={self.max_scale} must be above 1: the reference is 100")
        require(
            1 / self.max_scale <= self.init_temperature <= 1,
            f"objective.init_temperature={self.init_temperature} must lie in [1/max_scale, 1] = "
            f"[{1 / self.max_scale:g}, 1]: the reference is 0.07",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        from clipx.objective.contrastive import Contrastive, in_batch
        from clipx.objective.temperature import GlobalTemperature

        return Contrastive(comm, GlobalTemperature(self.init_temperature, self.max_scale), in_batch, self.tile)
