"""A linear classifier of image embeddings. b local batch, B global batch, C classes, D embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipx.data.class_names import class_embeddings, read_names, read_templates
from clipx.data.images import Draw
from clipx.data.source import BadSample, Sample
from clipx.data.spec import Classes
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError, DataError, require
from clipx.objective.base import Metrics, ModelFacts, Objective, StepInputs
from clipx.objective.classification import ClassificationSpec, Head
from clipx.objective.losses.temperature import Temperature


@dataclass(frozen=True, slots=True)
class Labels:
    """`TargetSource` of the label of each sample: an index into `names`, 0-dim int64."""

    names: Sequence[str]

    def draw(self, index: int, draw: Draw) -> Draw:
        return draw

    def rows(self, index: int, sample: Sample, caption: str, crop: int = 0) -> tuple[Tensor, ...]:
        return (torch.tensor(self.number(sample.label)),)

    def number(self, label: int | str | None) -> int:
        """Returns the index of a label. Raises BadSample if it is missing, or is not a known name or index."""
        if label is None:
            raise BadSample("label is missing")
        if isinstance(label, str):
            if label not in self.names:
                raise BadSample(f"label {label!r} is not among the {len(self.names)} class names")
            return list(self.names).index(label)
        if not 0 <= label < len(self.names):
            raise BadSample(f"label {label} is out of range: there are {len(self.names)} class names")
        return label


class Classification(Objective):
    """Cross-entropy of a linear head on the image embeddings; texts are not read. Targets: label_b."""

    def __init__(self, comm: Comm, temperature: Temperature, options: ClassificationSpec) -> None:
        super().__init__()
        self.comm, self.temperature, self.options = comm, temperature, options
        self.classes = Classes((), ())

    def prepare(self, classes: Classes | None, model: ModelFacts) -> None:
        """Creates the head from a normal distribution, with rows of about unit norm. Raises ConfigError."""
        self.classes = _classes(self.options, classes)
        self.head_CD = nn.Parameter(torch.empty(len(self.classes.names), model.embed_dim))
        nn.init.normal_(self.head_CD, std=model.embed_dim**-0.5)

    @property
    def target_source(self) -> Labels:
        return Labels(self.classes.names)

    @torch.no_grad()
    def initialize(self, embed: Callable[[Sequence[str]], Tensor]) -> None:
        """Sets the head to the zero-shot classifier: the renormalised mean over the templates of each class.
        Collective."""
        if self.options.head is not Head.zeroshot:
            return
        names, templates = self.classes.names, self.classes.templates
        class_CD = class_embeddings(embed, names, templates)
        self.head_CD.copy_(self.comm.gather(class_CD)[: len(names)])  # the embeddings of rank 0

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Metrics]:
        (label_b,) = inputs.targets
        scale = self.temperature()
        logits_bC = scale * inputs.image @ self.head_CD.T
        batch = self.comm.world * len(label_b)
        own = F.cross_entropy(logits_bC, label_b, reduction="sum", label_smoothing=self.options.label_smoothing) / batch
        hits = (logits_bC.argmax(1) == label_b).sum().to(own.dtype) / batch
        loss, top1 = self.comm.sum(torch.stack([own.detach(), hits])).unbind()
        # The value is that of the global batch, the gradient that of this rank's samples.
        return own + (loss - own.detach()), {"top1": top1, "temperature": 1 / scale.detach()}

    def after_step(self, samples_seen: int, found_inf: Tensor | None = None) -> None:
        self.temperature.after_step()

    @torch.no_grad()
    def score(self, image_ND: Tensor, labels: Sequence[int | str | None]) -> dict[str, float]:
        """Returns the accuracy of the head and of chance, in [0, 1], and the number of samples.

        Raises DataError for a label of no class.
        """
        try:
            label_N = torch.tensor([self.target_source.number(label) for label in labels], device=image_ND.device)
        except BadSample as error:
            raise DataError(f"held-out data for objective=classification: {error}") from None
        logits_NC = image_ND @ self.head_CD.to(image_ND.dtype).T
        hit_N = (logits_NC.argmax(1) == label_N) & logits_NC.isfinite().all(1)  # argmax takes NaN for the largest
        return {"top1": hit_N.double().mean().item(), "chance": 1 / len(self.classes.names), "samples": len(label_N)}


def _classes(options: ClassificationSpec, own: Classes | None) -> Classes:
    """Returns the names and templates of the options, or else those of the data. Raises ConfigError."""
    names = own.names if own else ()
    if options.classnames is not None:
        names = read_names(options.classnames, "objective.classnames")
        require(
            own is None or len(names) == len(own.names),
            f"objective.classnames={options.classnames} has {len(names)} names, but the data has "
            f"{len(own.names) if own else 0} classes: give one name per class, or remove objective.classnames to use "
            "the names of the data",
        )
    if not names:
        raise ConfigError(
            "objective.classnames has no value and the data names no classes: give a file with one name per line"
        )
    templates = (own.templates if own else ()) or ("a photo of a {}.",)
    if options.templates is not None:
        templates = read_templates(options.templates, "objective.templates")
    return Classes(names, templates)
