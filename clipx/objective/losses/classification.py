"""A linear classifier over image embeddings. b local batch, B global batch, C classes, D embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.data.class_names import class_embeddings, read_names, read_templates
from clipx.data.labels import Labels
from clipx.data.source import BadSample
from clipx.data.spec import Classes
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError, DataError, require
from clipx.objective.base import Metrics, Objective, StepInputs
from clipx.objective.losses.temperature import Temperature


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How the head begins, and the targets that it learns."""

    zeroshot: bool  # with the text embeddings of the class names, else at random
    classnames: str | None  # a file; None: the data's own names
    templates: str | None  # a file; None: the data's own templates
    label_smoothing: float


class Classification(Objective):
    """Scores images alone. Targets: label_b."""

    def __init__(self, comm: Comm, temperature: Temperature, head: HeadOptions) -> None:
        super().__init__()
        self.comm, self.temperature, self.options = comm, temperature, head
        self.classes = Classes((), ())

    def prepare(self, classes: Classes | None, width: int) -> None:
        """Makes the head, drawn at random with rows of about unit norm."""
        self.classes = _classes(self.options, classes)
        self.head_CD = nn.Parameter(torch.empty(len(self.classes.names), width))
        nn.init.normal_(self.head_CD, std=width**-0.5)

    @property
    def target_source(self) -> Labels:
        return Labels(self.classes.names)

    @torch.no_grad()
    def initialize(self, embed: Callable[[Sequence[str]], Tensor]) -> None:
        """The head becomes the zero-shot classifier: of each class the mean over the templates, renormalised."""
        if not self.options.zeroshot:
            return
        names, templates = self.classes.names, self.classes.templates
        class_CD = class_embeddings(embed, names, templates)
        self.head_CD.copy_(self.comm.gather(class_CD)[: len(names)])  # rank 0's

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        (label_b,) = inputs.targets
        scale = self.temperature()
        logits_bC = scale * inputs.image @ self.head_CD.T
        batch = self.comm.world * len(label_b)
        own = F.cross_entropy(logits_bC, label_b, reduction="sum", label_smoothing=self.options.label_smoothing) / batch
        hits = (logits_bC.argmax(1) == label_b).sum().to(own.dtype) / batch
        loss, top1 = self.comm.sum(torch.stack([own.detach(), hits])).unbind()
        # The value is global; the gradient is that of this rank's samples.
        return own + (loss - own.detach()), {"top1": top1, "temperature": 1 / scale.detach()}

    def after_step(self, samples_seen: int) -> None:
        self.temperature.after_step()

    @torch.no_grad()
    def score(self, image_ND: Tensor, labels: Sequence[int | str | None]) -> dict[str, float]:
        """The head's own accuracy, in [0, 1]. Raises DataError for a label that no class has."""
        try:
            label_N = torch.tensor([self.target_source.number(label) for label in labels], device=image_ND.device)
        except BadSample as error:
            raise DataError(f"held-out data for objective=classification: {error}") from None
        hit_N = (image_ND @ self.head_CD.to(image_ND.dtype).T).argmax(1) == label_N
        return {"top1": hit_N.double().mean().item(), "chance": 1 / len(self.classes.names)}


def _classes(options: HeadOptions, own: Classes | None) -> Classes:
    """The names and templates that the options say, or the data's own. Raises ConfigError."""
    names = own.names if own else ()
    if options.classnames is not None:
        names = read_names(options.classnames, "objective.classnames")
        require(
            own is None or len(names) == len(own.names),
            f"objective.classnames={options.classnames} has {len(names)} names where the data has "
            f"{len(own.names) if own else 0} classes: give one for each, or leave the data its own names",
        )
    if not names:
        raise ConfigError(
            "objective.classnames has no value and the data names no classes: give a file with one name a line"
        )
    templates = (own.templates if own else ()) or ("a photo of a {}.",)
    if options.templates is not None:
        templates = read_templates(options.templates, "objective.templates")
    return Classes(names, templates)
