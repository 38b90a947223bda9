"""Objectives: what scores the local batch of embeddings against the global one. One file and one YAML each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import MISSING
from clipx.errors import require

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


@dataclass(frozen=True, slots=True)
class ObjectiveTraffic:
    """Numbers that a step of an objective exchanges between ranks besides the embeddings, in float32."""

    statistics: int  # of a sample, gathered; 0: only the loss is summed
    read: int = 0  # columns of a sample's row in a per-sample table, whose rows are spread over the ranks
    written: int = 0  # of a sample, gathered for the rank that holds its row
    parameters: int = 1  # of the objective, whose gradients are summed


@dataclass(kw_only=True, slots=True)
class ObjectiveSpec:
    """The base of all objectives' options."""

    kind: str = MISSING
    indexed: ClassVar[bool] = False
    """Whether samples need numbers of their own, for state that is kept for each."""
    has_head: ClassVar[bool] = False
    """Whether it has weights of its own that are worth training alone."""
    reads_text: ClassVar[bool] = True
    """Whether it scores texts; else their embeddings are not computed."""
    compiles_tiles: ClassVar[bool] = False
    """Whether `compile.objective=true` compiles something: whether the objective has `compile_tiles`."""
    taught: ClassVar[bool] = False
    """Whether it wants a teacher's embeddings with each batch."""
    captions: ClassVar[bool] = False
    """Whether it takes each caption's loss besides the embeddings."""
    traffic: ClassVar[ObjectiveTraffic | None] = None
    """What a step exchanges between ranks, for `clipx.plan`; None: unknown, and no plan is made."""
    open_clip_loss: ClassVar[str | None] = None
    """Class of `open_clip.loss` with the same values and gradients; None where there is none."""

    def fixed_temperature(self) -> tuple[float, str]:
        """(τ, its origin) for an exported model, where no temperature of all pairs was learned."""
        return 0.07, f"objective={self.kind} has no temperature, and 0.07 is where CLIP's begins"

    def check(self, batch: int, samples: int | None) -> None:
        """Raises ConfigError where the options do not go with the batch, or with the data's size where it is known."""

    def build(self, comm: Comm, length: Length) -> Objective:
        """The objective; `length.epoch` is the size of the training set, which per-sample state needs."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class TiledSpec(ObjectiveSpec):
    """Objectives over the tiles of the matrix of all pairs."""

    tile: str = "auto"  # edge of the square tiles that pairs are scored in; memory grows with its square. auto: by size
    compiles_tiles: ClassVar[bool] = True

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
