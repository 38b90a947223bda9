"""Options of `python -m clipx.data.look`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clipx.config import limits
from clipx.config.registry import MISSING, option
from clipx.data.spec import DataSpec, check_effect
from clipx.errors import require
from clipx.model.spec import ModelSpec
from clipx.storage.url import check_path

UNUSED = ("evaluator", "objective", "optimizer")
"""Groups that options of other groups select, and that have no effect here."""

_MOST_SAMPLES = 1_000_000  # about 400 bytes are stored for each
_MOST_TILES = 1000  # about 10 kB of the page each
_MOST_BITS = 16  # of 64: pictures with more differences have nothing in common


@option("")
@dataclass(kw_only=True, slots=True)
class LookSpec:
    """`python -m clipx.data.look`: writes an HTML page about a data set as training reads it."""

    kind: str = "look"
    """Kind of the command's configuration. Fixed."""

    data: DataSpec | None = None
    """Data whose training samples are shown. Required. The options have the same effect as in training; data.workers
    processes read the samples."""

    model: ModelSpec = MISSING
    """Model whose image size, tokenizer and context length are used. It must read images. No weights are loaded."""

    seed: int = 0
    """Seed of the order, crops and captions, at least 0. With the seed of a run, the page shows the first samples of
    that run."""

    samples: int = 2000
    """Number of training samples for the statistics, in [1, 1000000]: those that training with `seed` reads first. Less
    if the data has fewer. About 400 bytes of memory each."""

    sheet: int = 48
    """Number of samples in the contact sheet, in [0, 1000]. Each adds 3 to 30 kB to the page."""

    near_bits: int = 4
    """Largest number of differing bits, of 64, in the perceptual hashes of near duplicates, in [0, 16]."""

    out: str = "look.html"
    """HTML file to write. An existing file is replaced."""

    evaluator: dict[str, Any] = field(default_factory=dict)
    """Unused: options of the groups data and model select evaluators. Setting it is an error."""

    objective: dict[str, Any] = field(default_factory=dict)
    """Unused: options of the group model select an objective. Setting it is an error."""

    optimizer: dict[str, Any] = field(default_factory=dict)
    """Unused: options of the group model select an optimizer. Setting it is an error."""

    def __post_init__(self) -> None:
        require(self.seed >= 0, f"seed={self.seed} is negative: give 0 or more")
        require(self.samples >= 1, f"samples={self.samples} must be at least 1: 2000 is the default")
        limits.check_limit("samples", self.samples, _MOST_SAMPLES)
        for key, value, limit in (("sheet", self.sheet, _MOST_TILES), ("near_bits", self.near_bits, _MOST_BITS)):
            require(0 <= value <= limit, f"{key}={value} must be in [0, {limit}]")
        require(self.out.endswith(".html"), f"out={self.out} must be a file name that ends in .html")
        check_path("out", self.out)
        check_effect(self.data, ("micro_batches", "captions_per_step"), "the samples")
        check_effect(self.data, ("decode",), "the samples, which are read on the CPU")
        require(
            self.model.image.features is None,
            f"model.image.features={self.model.image.features} reads stored features, which cannot be shown: choose a "
            "model that reads images, and the data with the images",
        )
        require(
            not self.model.image.native,
            "model.image.native=true reads images as patches, which cannot be shown: choose a model of square images, "
            "such as model=tiny, and the same data",
        )
        require(
            self.model.weights is None,
            f"model.weights={self.model.weights} has no effect on the samples: remove it",
        )
        for tower, location in self.model.tower_weights.items():
            require(False, f"model.{tower}.weights={location} has no effect on the samples: remove it")
