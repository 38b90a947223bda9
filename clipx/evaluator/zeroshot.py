"""Zero-shot classification: assigns each image to the class whose text embedding is most similar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import frozen, register
from clipx.data.class_names import read_names, read_templates
from clipx.data.spec import Classes, Dataset
from clipx.errors import ConfigError, DataError, require
from clipx.evaluator.spec import EvaluatorSpec

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedder, Metrics

Label = int | str | None


@register("evaluator")
@frozen
class ZeroShotSpec(EvaluatorSpec):
    """Zero-shot classification. Class embeddings are renormalized means over the templates (arXiv:2103.00020)."""

    compared: ClassVar[tuple[str, ...]] = ("top1", "top5", "mean_per_class_recall")
    metrics: ClassVar[tuple[str, ...]] = (*compared, "chance")

    kind: str = "zeroshot"
    """Kind of evaluator: zeroshot."""

    classnames: str | None = None
    """Class names for all data of this evaluator: imagenet (1,000 names), or a text file with one name per line, in the
    order of the labels. Subsets of a data set's classes are then not evaluated. null: the class names of each data
    set."""

    templates: str | None = None
    """Prompt templates for all data of this evaluator: openai_imagenet (80), simple (7), or a text file with one
    template per line, with {} for the class name. null: the templates of each data set, or "a photo of a {}." if it
    has no classes."""

    def check_files(self) -> None:
        self._given_names()
        self._given_templates()

    def check(self, data: Dataset) -> None:
        """Raises ConfigError or DataError if class names, templates or labels are missing or do not match."""
        from clipx.evaluator.base import preview

        assert data.held_out is not None
        self._numbers([sample.label for sample in preview(data.held_out)], self._classes(data))

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """Returns top1, top5, mean_per_class_recall, chance and samples. Collective.

        For each subset of classes, SUBSET/METRIC is the metric of its images with the classes of the subset only.
        """
        from clipx.evaluator.base import first_equal
        from clipx.evaluator.predictions import Compared

        assert data.held_out is not None
        classes = self._classes(data)
        images = embedder.images(data.held_out, self.batch_size)
        labels_N = torch.tensor(self._numbers(images.labels, classes))
        class_CD = embedder.classes(classes.names, classes.templates, self.batch_size)
        right = [[classes.names[label]] for label in labels_N.tolist()]
        embedder.compared(Compared("classes", data.held_out, images, classes.names, class_CD, right))
        same = first_equal(embedder.tokenizer, classes.names)
        logits_NC = first_of_repeated((images.image @ class_CD.T).cpu(), same)
        metrics = scores(logits_NC, labels_N)
        for name, subset in classes.subsets.items():
            columns = torch.tensor(list(subset))
            rows = torch.isin(labels_N, columns)
            if rows.any():
                among = scores(logits_NC[rows][:, columns], torch.searchsorted(columns, labels_N[rows]))
                metrics.update({f"{name}/{key}": value for key, value in among.items()})
        return metrics

    def _classes(self, data: Dataset) -> Classes:
        data_classes = data.classes
        names = self._given_names()
        if names is not None and data_classes is not None:
            require(
                len(names) == len(data_classes.names),
                f"evaluator.zeroshot.classnames={self.classnames} has {len(names)} names, but the data has "
                f"{len(data_classes.names)} classes: give one name per class, or null for the names of the data",
            )
        elif names is None and data_classes is None:
            raise ConfigError(
                "evaluator.zeroshot.classnames has no value, and the data has no class names: give a file with one "
                "name per line, or drop zero-shot with evaluator=[retrieval]"
            )
        subsets = data_classes.subsets if data_classes and not self.classnames else {}
        return Classes(names or (data_classes.names if data_classes else ()), self._templates(data_classes), subsets)

    def _given_names(self) -> Sequence[str] | None:
        return read_names(self.classnames, "evaluator.zeroshot.classnames") if self.classnames else None

    def _given_templates(self) -> Sequence[str] | None:
        return read_templates(self.templates, "evaluator.zeroshot.templates") if self.templates else None

    def _templates(self, data_classes: Classes | None) -> Sequence[str]:
        if (given := self._given_templates()) is not None:
            return given
        require(
            data_classes is None or bool(data_classes.templates),
            "evaluator.zeroshot.templates has no value, and the data has no templates: give openai_imagenet, simple, "
            "or a file with one template per line, with {} for the class name",
        )
        return data_classes.templates if data_classes else ("a photo of a {}.",)

    def _numbers(self, labels: Sequence[Label], classes: Classes) -> list[int]:
        """Returns the labels as class indices. Raises ConfigError if a label is missing, DataError if it is unknown."""
        source = self.classnames or "the data's class names"
        index = {name: i for i, name in enumerate(classes.names)}
        count = len(classes.names)
        for label in labels:
            if label is None:
                raise ConfigError(
                    "zero-shot needs labels, and the held-out data has none: give data.label_column (csv) or "
                    "data.label_key (webdataset), or drop zero-shot with evaluator=[retrieval]"
                )
            if isinstance(label, str) and label not in index:
                raise DataError(f"label {label!r} is not in {source}, which has {count} names: add it")
            if isinstance(label, int) and not 0 <= label < count:
                raise DataError(f"label {label} does not match {source}: {count} names allow labels 0 to {count - 1}")
        return [index[label] if isinstance(label, str) else int(label or 0) for label in labels]


def first_of_repeated(logits_NC: torch.Tensor, same_C: Sequence[int]) -> torch.Tensor:
    """Lowers the logits of classes with a repeated name, each just below those of the preceding class of that name.

    The first class of a name then wins. Otherwise none would, because a tie counts against the right class. ImageNet
    has two classes named missile, for example. `same_C`: equal for classes whose names have equal tokens. Modifies
    `logits_NC` in place and returns it.
    """
    latest: dict[int, int] = {}
    for i, name in enumerate(same_C):
        if name in latest:
            logits_NC[:, i] = torch.nextafter(logits_NC[:, latest[name]], logits_NC.new_tensor(-torch.inf))
        latest[name] = i
    return logits_NC


def scores(logits_NC: torch.Tensor, labels_N: torch.Tensor) -> Metrics:
    """Returns top1, top5, mean_per_class_recall and chance, in [0, 1], and the number of samples.

    A tie counts against the right class, so equal scores count as wrong. So does a right class with a logit that is
    not finite; a wrong one with such a logit is below all others.
    """
    logits_NC = logits_NC.nan_to_num(-torch.inf, -torch.inf, -torch.inf)
    right_N1 = logits_NC.gather(1, labels_N[:, None])
    rank_N = ((logits_NC >= right_N1).sum(1) - 1).masked_fill(right_N1[:, 0] == -torch.inf, max(logits_NC.shape[1], 5))
    hit_N, top5_N = (rank_N == 0).double(), (rank_N < 5).double()
    ones_N = torch.ones_like(hit_N)
    hits_C, samples_C = (x.new_zeros(logits_NC.shape[1]).index_add(0, labels_N, x) for x in (hit_N, ones_N))
    recall = (hits_C / samples_C.clamp(min=1)).sum() / (samples_C > 0).sum()  # over the classes with samples
    top1, top5, mean_recall = torch.stack([hit_N.mean(), top5_N.mean(), recall]).tolist()  # one read
    found = {"top1": top1, "top5": top5, "mean_per_class_recall": mean_recall, "chance": 1 / logits_NC.shape[1]}
    return {**found, "samples": len(labels_N)}
