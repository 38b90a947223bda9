"""Base classes of the objectives' options. Each objective has one file and one YAML."""

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
    """Float32 numbers that a step of an objective exchanges between ranks, in addition to the embeddings."""

    statistics: int
    """Numbers per sample in the all_gather of statistics. 0: only the loss is summed."""

    read: int = 0
    """Columns read per sample from a per-sample table, whose rows are sharded over the ranks."""

    written: int = 0
    """Columns written per sample, gathered for the rank that holds the row."""

    parameters: int = 1
    """Parameters of the objective, whose gradients are summed over the ranks."""


@dataclass(kw_only=True, slots=True)
class ObjectiveSpec:
    """Base class of the options of all objectives."""

    kind: str = MISSING
    """Type of the objective; set by the choice of an option, e.g. objective=infonce."""

    indexed: ClassVar[bool] = False
    """True if the objective stores state for each sample, so that each sample needs an index in the data set."""

    has_head: ClassVar[bool] = False
    """True if the objective has weights that can be trained alone, with the model locked."""

    reads_text: ClassVar[bool] = True
    """True if the objective reads texts. Otherwise text embeddings are not computed."""

    compiles_tiles: ClassVar[bool] = False
    """True if the objective implements `compile_tiles`, so that `compile.objective=true` has an effect."""

    taught: ClassVar[bool] = False
    """True if the objective needs a teacher's embeddings with each batch."""

    captions: ClassVar[bool] = False
    """True if the objective needs the loss of each caption in addition to the embeddings."""

    traffic: ClassVar[ObjectiveTraffic | None] = None
    """Numbers that a step exchanges between ranks, for `clipx.plan`. None: unknown; `clipx.plan` reports an error."""

    open_clip_loss: ClassVar[str | None] = None
    """Class of `open_clip.loss` with the same values and gradients. None: there is no such class."""

    def fixed_temperature(self) -> tuple[float, str]:
        """Returns (τ, its origin) for an exported model where no global temperature was learned."""
        return 0.07, f"the initial temperature 0.07 of CLIP, since objective={self.kind} has no temperature"

    def check(self, batch: int, samples: int | None) -> None:
        """Raises ConfigError where the options do not fit the batch size or the data's number of samples (None:
        unknown)."""

    def build(self, comm: Comm, length: Length) -> Objective:
        """Returns the objective. `length.epoch` is the size of the training set, which per-sample state needs."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class TiledSpec(ObjectiveSpec):
    """Base class of the options of objectives that score the matrix of all pairs in tiles."""

    tile: str = "auto"
    """Edge of the square tiles in which pairs are scored, in samples; memory grows with its square. At least 1, or
    auto: 1024 on a CPU, where a tile stays in the cache, 4096 on a GPU, and at most a rank's share of the batch."""

    compiles_tiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            self.tile == "auto" or (self.tile.isdecimal() and int(self.tile) >= 1),
            f"objective.tile={self.tile} must be a whole number of at least 1, or auto",
        )

    def tile_size(self, comm: Comm, length: Length) -> int:
        """Returns the edge of a tile. On a CPU tiles stay in the cache; a GPU needs larger tiles to be fully used."""
        if self.tile != "auto":
            return int(self.tile)
        return min(1024 if comm.device.type == "cpu" else 4096, max(1, length.batch // comm.world))


@dataclass(kw_only=True, slots=True)
class LearnedTemperatureSpec(TiledSpec):
    """Base class of the options of objectives with one learned temperature for all pairs."""

    init_temperature: float = 0.07
    """Initial temperature τ of all pairs; log 1/τ is learned. In [1/max_scale, 1]. The reference is 0.07."""

    max_scale: float = 100.0
    """Largest inverse temperature 1/τ; clamped after each step. Above 1. The reference is 100."""

    def __post_init__(self) -> None:
        TiledSpec.__post_init__(self)
        require(self.max_scale > 1, f"objective.max_scale={self.max_scale} must be above 1: the reference is 100")
        require(
            1 / self.max_scale <= self.init_temperature <= 1,
            f"objective.init_temperature={self.init_temperature} must be in [1/max_scale, 1] = "
            f"[{1 / self.max_scale:g}, 1]: the reference is 0.07",
        )
