"""HTML pages about data sets as training reads them: the options of `python -m clipx.look`."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from clipx.config.registry import MISSING, frozen, register
from clipx.data.spec import DataSpec, check_effect
from clipx.errors import require
from clipx.model.spec import ModelSpec
from clipx.storage.url import check_path


@register("")
@frozen
class LookSpec:
    """`python -m clipx.look`: writes an HTML page about a data set as training reads it."""

    unused: ClassVar = ("evaluator", "objective", "optimizer")
    """Groups that options of other groups select, and that have no effect here."""

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
    """Number of training samples for the statistics, at least 1: those that training with `seed` reads first. Less
    if the data has fewer. About 300 bytes of memory each, and 250 for each caption."""

    sheet: int = 48
    """Number of samples in the contact sheet, at least 0. Each adds 3 to 30 kB to the page."""

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
        require(self.sheet >= 0, f"sheet={self.sheet} must be at least 0: 48 is the default")
        require(0 <= self.near_bits <= 16, f"near_bits={self.near_bits} must be in [0, 16]")
        require(self.out.endswith(".html"), f"out={self.out} must be a file name that ends in .html")
        check_path("out", self.out)
        check_effect(self.data, ("micro_batches", "captions_per_step"), "the samples")
        check_effect(self.data, ("decode",), "the samples, which are read on the CPU")
        fix = "choose a model of square images, such as model=tiny, and data with images"
        self.model.image.kind.check_squares_for("this page, which shows what a model reads", fix)
        towers = {f"{tower}.weights": location for tower, location in self.model.tower_weights.items()}
        for key, location in {"weights": self.model.weights, **towers}.items():
            require(location is None, f"model.{key}={location} has no effect on the samples: remove it")
