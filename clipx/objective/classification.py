"""Fine-tuning of the image tower on classes, with a head initialized as the zero-shot classifier (arXiv:2109.01903)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.objective.spec import ObjectiveSpec, check_initial

if TYPE_CHECKING:
    from clipx.config.duration import Length
    from clipx.distributed.comm import Comm
    from clipx.objective.base import Objective


class Head(StrEnum):
    """Initialization of the classification head."""

    zeroshot = "zeroshot"
    random = "random"


@register("objective")
@frozen
class ClassificationSpec(ObjectiveSpec):
    """Cross-entropy of a linear head [C, D] on the image embeddings, times a learned scale. Mean over B.

    The text tower is neither trained nor computed in a step; the evaluation of zero-shot classification still uses it.
    """

    kind: str = "classification"

    head: Head = Head.zeroshot
    """Initialization of the head. zeroshot: the text embeddings of the class names, averaged over the templates, that
    is, the zero-shot classifier of the initial weights. random: a normal distribution, with rows of about unit norm."""

    classnames: str | None = None
    """Class names in the order of the labels: a text file with one name per line, or imagenet for the 1,000 names of
    ImageNet. null: the class names of the data. The same format as evaluator.zeroshot.classnames."""

    templates: str | None = option(None, when="head == zeroshot")
    """Prompt templates of head=zeroshot: a text file with one template per line, where {} or {c} is the class name, or
    openai_imagenet (80 templates) or simple (7). null: the templates of the data, or "a photo of a {}." where it has
    none. The same format as evaluator.zeroshot.templates."""

    init_temperature: float = option(0.01, gt=0, le=1, hint="0.01 is usual")
    """Initial temperature τ, at least 1/max_scale, whose inverse multiplies the logits and is learned."""

    max_scale: float = option(100.0, gt=1, hint="the reference is 100")
    """Largest inverse temperature 1/τ; clamped after each step. The reference is 100."""

    label_smoothing: float = option(0.0, ge=0, lt=1, hint="0.1 is usual")
    """Share of the target distribution that is spread evenly over all classes (arXiv:1512.00567). 0: no smoothing; 0.1
    is usual."""

    zero_minimum: ClassVar[bool] = True
    has_head: ClassVar[bool] = True
    reads_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_initial(self.init_temperature, "1/max_scale", 1 / self.max_scale)

    def build(self, comm: Comm, length: Length) -> Objective:
        """Returns the objective without its head; `prepare` creates the head when the classes are known."""
        from clipx.objective.losses.classification import Classification
        from clipx.objective.losses.temperature import GlobalTemperature

        return Classification(comm, GlobalTemperature(self.init_temperature, self.max_scale), self)
