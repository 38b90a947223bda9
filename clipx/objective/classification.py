"""Fine-tuning of the image tower to classes, by a head that begins as the zero-shot classifier (arXiv:2109.01903)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.registry import option
from clipx.errors import require
from clipx.objective.spec import ObjectiveSpec

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


class Head(StrEnum):
    """What the head begins as."""

    zeroshot = "zeroshot"  # the text embeddings of the class names, over the templates
    random = "random"


@option("objective")
@dataclass(kw_only=True, slots=True)
class ClassificationSpec(ObjectiveSpec):
    """Cross-entropy of a linear head [C, D] on the image embeddings, times a learned scale. Mean over B.

    The text tower has no part in it, and is not computed: it is what zero-shot classification is still measured by.
    """

    kind: str = "classification"
    head: Head = Head.zeroshot
    classnames: str | None = None  # as evaluator.zeroshot's; null: the data's own
    templates: str | None = None  # as evaluator.zeroshot's; null: the data's own
    init_temperature: float = 0.01
    max_scale: float = 100.0  # largest inverse temperature
    label_smoothing: float = 0.0  # share of the target that all classes have alike (arXiv:1512.00567)
    has_head: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.max_scale > 1, f"objective.max_scale={self.max_scale} must be above 1: the reference is 100")
        require(
            1 / self.max_scale <= self.init_temperature <= 1,
            f"objective.init_temperature={self.init_temperature} must lie in [1/max_scale, 1] = "
            f"[{1 / self.max_scale:g}, 1]: 0.01 is usual",
        )
        require(
            0 <= self.label_smoothing < 1,
            f"objective.label_smoothing={self.label_smoothing} must lie in [0, 1): 0.1 is usual",
        )
        require(
            self.templates is None or self.head is Head.zeroshot,
            f"objective.templates={self.templates} has no effect on objective.head=random: leave it out",
        )

    def build(self, comm: Comm, length: Length) -> Objective:
        """Without its head, which `prepare` makes when the classes are known."""
        from clipx.objective.losses.classification import Classification, HeadOptions
        from clipx.objective.losses.temperature import GlobalTemperature

        head = HeadOptions(self.head is Head.zeroshot, self.classnames, self.templates, self.label_smoothing)
        return Classification(comm, GlobalTemperature(self.init_temperature, self.max_scale), head)
