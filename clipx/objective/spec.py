"""Objectives: what scores the local batch of embeddings against the global one. One file and one YAML each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config.registry import MISSING
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@dataclass(kw_only=True, slots=True)
class ObjectiveSpec:
    """The base of all objectives' options."""

    kind: str = MISSING

    @property
    def indexed(self) -> bool:
        """Whether samples need numbers of their own, for state that is kept for each."""
        return False

    @property
    def has_head(self) -> bool:
        """Whether it has weights of its own that are worth training alone."""
        return False

    @property
    def reads_text(self) -> bool:
        """Whether it scores texts; else their embeddings are not computed."""
        return True

    @property
    def taught(self) -> bool:
        """Whether it wants a teacher's embeddings with each batch."""
        return False

    @property
    def captions(self) -> bool:
        """Whether it takes each caption's loss besides the embeddings."""
        return False

    def check(self, batch: int, samples: int | None) -> None:
        """Raises ConfigError where the options do not go with the batch, or with the data's size where it is known."""

    def build(self, comm: Comm, length: Length) -> Objective:
        """The objective; `length.epoch` is the size of the training set, which per-sample state needs."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class TiledSpec(ObjectiveSpec):
    """Objectives over the tiles of the matrix of all pairs."""

    tile: str = "auto"  # edge of the square tiles that pairs are scored in; memory grows with its square. auto: by size

    def __post_init__(self) -> None:
        require(
            self.tile == "auto" or (self.tile.isdecimal() and int(self.tile) >= 1),
            f"objective.tile={self.tile} must be at least 1, or auto",
        )

    def tile_size(self, comm: Comm, length: Length) -> int:
        """The edge of a tile. On a CPU tiles stay in the cache; a GPU needs larger ones to be busy."""
        if self.tile != "auto":
            return int(self.tile)
        return min(1024 if comm.device.type == "cpu" else 4096, max(1, length.batch // comm.world))


@dataclass(kw_only=True, slots=True)
class LearnedTemperatureSpec(TiledSpec):
    """Objectives with one learned temperature."""

    init_temperature: float = 0.07
    max_scale: float = 100.0  # largest inverse temperature

    def __post_init__(self) -> None:
        TiledSpec.__post_init__(self)
        require(self.max_scale > 1, f"objective.max_scale={self.max_scale} must be above 1: the reference is 100")
        require(
            1 / self.max_scale <= self.init_temperature <= 1,
            f"objective.init_temperature={self.init_temperature} must lie in [1/max_scale, 1] = "
            f"[{1 / self.max_scale:g}, 1]: the reference is 0.07",
        )
