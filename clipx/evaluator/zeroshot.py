"""Zero-shot classification: each image takes the class whose description is nearest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.registry import option
from clipx.data.class_names import read_names, read_templates
from clipx.data.spec import Classes, Dataset
from clipx.errors import ConfigError, DataError, require
from clipx.evaluator.spec import EvaluatorSpec

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedder, Metrics

Label = int | str | None


@option("evaluator")
@dataclass(kw_only=True, slots=True)
class ZeroShotSpec(EvaluatorSpec):
    """Class embeddings are means over the templates, renormalised (arXiv:2103.00020)."""

    compared: ClassVar[tuple[str, ...]] = ("top1", "top5", "mean_per_class_recall")

    kind: str = "zeroshot"
    # For all data of this evaluator; null: each one's own.
    classnames: str | None = None  # imagenet, or a file with one name a line, in the order of the labels
    templates: str | None = (
        None  # openai_imagenet (80), simple (7), or a file with one a line, {} standing for the name
    )

    def check(self, data: Dataset) -> None:
        from clipx.evaluator.base import preview

        assert data.held_out is not None
        self._numbers([sample.label for sample in preview(data.held_out)], self._classes(data))

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """top1, top5, mean per-class recall and chance; for each subset of classes the same among themselves."""
        assert data.held_out is not None
        classes = self._classes(data)
        images = embedder.images(data.held_out, self.batch_size)
        labels_N = torch.tensor(self._numbers(images.labels, classes))
        class_CD = embedder.classes(classes.names, classes.templates, self.batch_size)
        logits_NC = first_of_repeated((images.image @ class_CD.T).cpu(), classes.names)
        metrics = scores(logits_NC, labels_N)
        for name, subset in classes.subsets.items():
            columns = torch.tensor(list(subset))
            rows = torch.isin(labels_N, columns)
            if rows.any():
                among = scores(logits_NC[rows][:, columns], torch.searchsorted(columns, labels_N[rows]))
                metrics.update({f"{name}/{key}": value for key, value in among.items()})
        return metrics

    def _classes(self, data: Dataset) -> Classes:
        own = data.classes
        names = read_names(self.classnames, "evaluator.zeroshot.classnames") if self.classnames else None
        if names is not None and own is not None:
            require(
                len(names) == len(own.names),
                f"evaluator.zeroshot.classnames={self.classnames} has {len(names)} names where the data has "
                f"{len(own.names)} classes: give one for each, or leave the data its own names",
            )
        elif names is None and own is None:
            raise ConfigError(
                "evaluator.zeroshot.classnames has no value and the data names no classes: give a file with one name a "
                "line, or leave zero-shot out with evaluator=[retrieval]"
            )
        subsets = own.subsets if own and not self.classnames else {}
        return Classes(names or (own.names if own else ()), self._templates(own), subsets)

    def _templates(self, own: Classes | None) -> Sequence[str]:
        if self.templates:
            return read_templates(self.templates, "evaluator.zeroshot.templates")
        require(
            own is None or bool(own.templates),
            "evaluator.zeroshot.templates has no value and the data has no templates: give openai_imagenet, simple, or "
            "a file with one a line, {} standing for the name",
        )
        return own.templates if own else ("a photo of a {}.",)

    def _numbers(self, labels: Sequence[Label], classes: Classes) -> list[int]:
        """The labels as indices. Raises ConfigError where there are none, DataError for one that no class has."""
        source = self.classnames or "the data's class names"
        index = {name: i for i, name in enumerate(classes.names)}
        count = len(classes.names)
        for label in labels:
            if label is None:
                raise ConfigError(
                    "zero-shot needs labels and the held-out data has none: give data.label_column (csv) or "
                    "data.label_key (webdataset), or leave zero-shot out with evaluator=[retrieval]"
                )
            if isinstance(label, str) and label not in index:
                raise DataError(f"label {label!r} is not in {source}, which has {count} names: add it")
            if isinstance(label, int) and not 0 <= label < count:
                raise DataError(
                    f"label {label} is out of step with {source}: {count} names allow labels 0 to {count - 1}"
                )
        return [index[label] if isinstance(label, str) else int(label or 0) for label in labels]


def first_of_repeated(logits_NC: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Of classes whose names are the same, as two of ImageNet's are missiles, the first wins, by the smallest step: it
    would be none's otherwise, for a tie counts against the right class."""
    latest: dict[str, int] = {}
    for i, name in enumerate(names):
        if name in latest:
            logits_NC[:, i] = torch.nextafter(logits_NC[:, latest[name]], logits_NC.new_tensor(-torch.inf))
        latest[name] = i
    return logits_NC


def scores(logits_NC: torch.Tensor, labels_N: torch.Tensor) -> Metrics:
    """Accuracies in [0, 1]. A tie counts against the right class, so that equal scores are no success."""
    own_N1 = logits_NC.gather(1, labels_N[:, None])
    rank_N = (logits_NC >= own_N1).sum(1) - 1
    hit = (rank_N == 0).double()
    present = labels_N.unique()
    recalls = [hit[labels_N == label].mean().item() for label in present]
    return {
        "top1": hit.mean().item(),
        "top5": (rank_N < 5).double().mean().item(),
        "mean_per_class_recall": sum(recalls) / len(recalls),
        "chance": 1 / logits_NC.shape[1],
    }
