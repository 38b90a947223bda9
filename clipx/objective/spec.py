"""Base classes of the objectives' options."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import MISSING, frozen
from clipx.errors import require, require_effect

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.data.spec import DataSpec
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective
    from clipx.objective.losses.contrastive import Tiling
    from clipx.objective.losses.temperature import Temperature

_SPLIT_BATCH = 8192  # below it, float32 products take about 1 % of a step of ViT-B/32 on an H100 (estimate)


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

    prototypes: int = 0
    """Rows of the width of an embedding, for the images and for the texts, whose gradients are summed `updates`
    times."""

    updates: int = 0
    """Sums of the gradients of `prototypes`, an all_reduce each."""

    summed: int = 0
    """Further numbers that one all_reduce sums."""

    texts: int = 1
    """Texts of a sample whose embeddings are gathered."""

    digests: int = 0
    """Numbers of 8 bytes per sample in an all_gather: its index and the digests of its captions."""


class SameCaption(StrEnum):
    """Treatment of a pair of an image and the equal caption of another sample of the batch."""

    negative = "negative"
    mask = "mask"
    positive = "positive"


@frozen
class ObjectiveSpec:
    """Base class of the options of all objectives.

    A subclass is a dataclass made by `@frozen`. Its fields are the keys `objective.KEY`; `build` makes the objective.

    Args:
        kind: type of the objective; set by the choice of an option, e.g. objective=infonce.

    Raises:
        ConfigError: an option is outside of its range, or does not fit the others, the data (`check`,
            `check_captions`), the device (`check_device_type`) or the teacher (`check_teacher`).
        NotImplementedError: a subclass has no `build`.

    Example:
        The options of a run, and the objective that they build:

            >>> from clipx import compose
            >>> from clipx.config import Length
            >>> run = compose("objective=siglip", "distributed.device=cpu")
            >>> run.objective.kind, run.objective.reads_text, run.objective.indexed
            ('siglip', True, False)
            >>> objective = run.objective.build(run.distributed.build(), Length(epoch=1438, batch=32))
            >>> len(list(objective.parameters()))  # log α and β
            2
    """

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

    zero_minimum: ClassVar[bool] = False
    """True if the loss is 0 for embeddings that match perfectly and at least 0 otherwise, as `max_final_loss` needs."""

    taught: ClassVar[bool] = False
    """True if the objective needs a teacher's embeddings with each batch."""

    untaught: ClassVar[str | None] = None
    """Objective with the cost of this one without its teacher, which `clipx.plan` recommends. None: no such one."""

    outputs: ClassVar[str | None] = None
    """Further output of the model that the objective reads: equal to `ModelSpec.outputs`. None: none."""

    reads_trunk: ClassVar[bool] = False
    """True if the objective reads and trains the pooled features of the image trunk before the projection."""

    traffic: ClassVar[ObjectiveTraffic | None] = None
    """Numbers that a step exchanges between ranks, for `clipx.plan`. None: unknown; `clipx.plan` reports an error."""

    open_clip_loss: ClassVar[str | None] = None
    """Class of `open_clip.loss` with the same values and gradients. None: there is no such class."""

    @property
    def teacher_logits(self) -> bool:
        """True if the objective compares with a teacher's logits, its similarities divided by its temperature. False:
        with its similarities or embeddings."""
        return True

    def exchanged(self) -> ObjectiveTraffic | None:
        """Returns `traffic` with the options of this spec, for `clipx.plan`."""
        return self.traffic

    def compares_captions(self, data: DataSpec) -> bool:
        """Returns whether the objective compares the captions of a batch of this data."""
        return False

    def check_captions(self, data: DataSpec) -> None:
        """Raises ConfigError if the objective does not support the number of captions of a sample in a step."""
        require(
            data.captions_per_step == 1,
            f"data.captions_per_step={data.captions_per_step} needs a loss with several right captions, and objective="
            f"{self.kind} has one: choose objective=infonce or siglip, or remove it",
        )

    def has_zero_minimum(self, data: DataSpec) -> bool:
        """Returns `zero_minimum` for this data."""
        return self.zero_minimum

    def describe(self, length: Length) -> str | None:
        """Returns the values that the objective computes for a run of `length`, for the log. None: there are none."""
        return None

    def caution(self, length: Length) -> str | None:
        """Returns a note for the start of a run of `length` that lacks what the objective's name promises."""
        return None

    def fixed_temperature(self) -> tuple[float, str]:
        """Returns (τ, its origin) for an exported model where no global temperature was learned."""
        return 0.07, f"the initial temperature 0.07 of CLIP, since objective={self.kind} has no temperature"

    def check(self, batch: int, samples: int | None) -> None:
        """Raises ConfigError where the options do not fit the batch size or the data's number of samples (None:
        unknown)."""

    def check_device_type(self, device_type: str) -> None:
        """Raises ConfigError if no device of this type, such as cpu, computes the loss."""

    def check_teacher(self, widths: Sequence[int], width: int) -> None:
        """Raises ConfigError where the embeddings of the teachers do not fit. `widths`: theirs; `width`: the
        model's."""

    def build(self, comm: Comm, length: Length) -> Objective:
        """Returns the objective. `length.epoch` is the size of the training set, which per-sample state needs."""
        raise NotImplementedError


def check_initial(temperature: float, key: str, least: float) -> None:
    """Raises ConfigError for an initial temperature below the least one, which `key` gives."""
    require(
        temperature >= least,
        f"objective.init_temperature={temperature} must be in [{key}, 1] = [{least:g}, 1]: 0.07 is usual",
    )


class ProductFormat(StrEnum):
    """Formats of the matrix products of a loss over all pairs."""

    auto = "auto"
    float32 = "float32"
    split_fp16 = "split_fp16"
    fused = "fused"


@frozen
class TiledSpec(ObjectiveSpec):
    """Base class of the options of objectives that score the matrix of all pairs in tiles."""

    tile: str = option("auto", choices=("auto",), ge=1)
    """Edge of the square tiles in which pairs are scored, in samples; memory grows with its square. auto: 1024 on a
    CPU, where a tile stays in the cache, 4096 on a GPU, and at most a rank's share of the batch."""

    products: ProductFormat = ProductFormat.auto
    """Format of the matrix products of the loss. auto: split_fp16 on CUDA for a global batch of at least 8192,
    otherwise float32. float32: without TF32. split_fp16: float16 halves on tensor cores, with an error of logits below
    1e-3, and gradients in TF32; emulated on a CPU. fused: split_fp16 in Triton kernels, for a global batch of 32,768
    and more on CUDA. float64 embeddings are always scored in float64."""

    one_temperature: ClassVar[bool] = True
    """True if the loss is of softmaxes at one temperature for all pairs, which `products=fused` needs."""

    compiles_tiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_effect(
            self.products is not ProductFormat.fused or self.one_temperature,
            "objective.products=fused",
            f"on objective={self.kind}, whose kernels are of softmaxes at one temperature for all pairs",
            "use split_fp16",
        )

    def check_device_type(self, device_type: str) -> None:
        require(
            self.products is not ProductFormat.fused
            or (device_type == "cuda" and importlib.util.find_spec("triton") is not None),
            f"objective.products=fused needs a CUDA device and triton, this run has {device_type}: use auto, or pip "
            "install triton",
        )

    def tile_size(self, comm: Comm, length: Length) -> int:
        """Returns the edge of a tile. On a CPU tiles stay in the cache; a GPU needs larger tiles to be fully used."""
        if self.tile != "auto":
            return int(self.tile)
        return min(1024 if comm.device.type == "cpu" else 4096, max(1, length.batch // comm.world))

    def tiling(self, comm: Comm, length: Length) -> Tiling:
        """Returns the tiles of the loss with the format of their products. Raises ConfigError."""
        from clipx.objective.losses.contrastive import Tiling
        from clipx.objective.losses.products import EXACT, SplitProducts

        products = SplitProducts() if self.splits(comm, length) else EXACT
        if self.products is ProductFormat.fused:
            self.check_device_type(comm.device.type)
            from clipx.objective.losses.fused import FusedProducts

            products = FusedProducts()
        return Tiling(self.tile_size(comm, length), products)

    def splits(self, comm: Comm, length: Length) -> bool:
        """Returns whether scores are computed from float16 halves."""
        if self.products is not ProductFormat.auto:
            return self.products is not ProductFormat.float32
        return comm.device.type == "cuda" and length.batch >= _SPLIT_BATCH


class TemperatureRule(StrEnum):
    """Rules of the temperature of all pairs."""

    learned = "learned"
    constant = "constant"


@frozen
class LearnedTemperatureSpec(TiledSpec):
    """Base class of the options of objectives with one temperature for all pairs, learned unless it is constant."""

    temperature: TemperatureRule = TemperatureRule.learned
    """Rule of the temperature. learned: log 1/τ is a parameter, trained at the model's learning rate. constant: τ is
    init_temperature in the whole run."""

    init_temperature: float = option(0.07, gt=0, le=1, hint="the reference is 0.07")
    """Initial temperature τ of all pairs, at least 1/max_scale. The reference is 0.07."""

    max_scale: float = option(100.0, gt=1, hint="the reference is 100")
    """Largest inverse temperature 1/τ: a learned one is clamped after each step, a constant one must not exceed it. The
    reference is 100."""

    def __post_init__(self) -> None:
        TiledSpec.__post_init__(self)
        check_initial(self.init_temperature, "1/max_scale", 1 / self.max_scale)

    def build_temperature(self) -> Temperature:
        """Returns the temperature of all pairs, learned or constant."""
        from clipx.objective.losses.temperature import ConstantTemperature, GlobalTemperature

        if self.temperature is TemperatureRule.constant:
            return ConstantTemperature(self.init_temperature)
        return GlobalTemperature(self.init_temperature, self.max_scale)

    def exchanged(self) -> ObjectiveTraffic | None:
        if self.traffic is None or self.temperature is TemperatureRule.learned:
            return self.traffic
        return replace(self.traffic, parameters=self.traffic.parameters - 1)

    def fixed_temperature(self) -> tuple[float, str]:
        tau = self.init_temperature
        return tau, f"the constant temperature {tau:g} of objective={self.kind}"


@frozen
class SeveralCaptionsSpec(LearnedTemperatureSpec):
    """Base class of the options of objectives that take several captions of an image, and compare captions."""

    same_caption: SameCaption = SameCaption.negative
    """Pairs of an image with the equal caption of another sample of the global batch: negative (as any other), mask
    (left out of the loss) or positive (right as well). Captions are equal if their tokens are."""

    def has_one_right_caption(self, data: DataSpec) -> bool:
        """Returns whether each image has one right caption in a batch."""
        return data.captions_per_step == 1 and self.same_caption is not SameCaption.positive

    def compares_captions(self, data: DataSpec) -> bool:
        return data.captions_per_step > 1 or self.same_caption is not SameCaption.negative

    def check_captions(self, data: DataSpec) -> None:
        each = data.captions_per_step
        compared = f"data.captions_per_step={each}" if each > 1 else f"objective.same_caption={self.same_caption}"
        require(
            self.products is not ProductFormat.fused or not self.compares_captions(data),
            f"{compared} does not support objective.products=fused, whose kernels are of one right caption of each "
            "image: use split_fp16",
        )
        require(
            data.indexed or not self.compares_captions(data),
            f"{compared} compares the samples of a batch, but data={data.kind} has no sample indices: choose data with "
            "indices, or remove it",
        )
