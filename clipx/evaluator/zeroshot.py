"""Zero-shot classification: each image takes the class whose description is nearest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.config import option
from clipx.data import Classes, Dataset
from clipx.data.source import BadSample
from clipx.errors import ConfigError, DataError
from clipx.evaluator import EvaluatorSpec
from clipx.lazy import torch

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedder, Metrics

_CHECKED = 256  # held-out samples whose labels are looked at before training starts


@option("evaluator")
@dataclass(kw_only=True, slots=True)
class ZeroShotSpec(EvaluatorSpec):
    """Class embeddings are means over the templates, renormalised (arXiv:2103.00020)."""

    kind: str = "zeroshot"
    classnames: str | None = None  # file with one name a line, in the order of the labels; null: the data's own
    templates: str | None = None  # file with one template a line, {} standing for the name; null: the data's own

    def check(self, data: Dataset) -> None:
        classes = self._classes(data)
        assert data.held_out is not None
        total = sum(data.held_out.sizes)
        for index in range(0, total, -(-total // _CHECKED)):
            try:
                label = data.held_out.read(index).label
            except BadSample:  # counted when it is evaluated
                continue
            self._label(label, classes)

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """top1, top5, mean per-class recall and chance; for each subset of classes the same among themselves."""
        assert data.held_out is not None
        classes = self._classes(data)
        images = embedder.images(data.held_out, self.batch_size)
        labels = torch.tensor([self._label(label, classes) for label in images.labels])
        prompts = [t.replace("{}", name) for name in classes.names for t in classes.templates]
        text = embedder.texts(prompts, self.batch_size).unflatten(0, (len(classes.names), -1))
        class_CD = torch.nn.functional.normalize(text.mean(1), dim=-1)
        logits_NC = (images.image @ class_CD.T).cpu()
        metrics = scores(logits_NC, labels)
        for name, subset in classes.subsets.items():
            columns = torch.tensor(list(subset))
            rows = torch.isin(labels, columns)
            if rows.any():
                among = scores(logits_NC[rows][:, columns], torch.searchsorted(columns, labels[rows]))
                metrics.update({f"{name}/{key}": value for key, value in among.items()})
        return metrics

    def _classes(self, data: Dataset) -> Classes:
        own = data.classes
        names = _lines(self.classnames, "classnames") if self.classnames else own.names if own else None
        templates = (
            _lines(self.templates, "templates") if self.templates else own.templates if own else ("a photo of a {}.",)
        )
        if names is None:
            raise ConfigError(
                "evaluator.zeroshot.classnames has no value and the data names no classes: give a file with one name a "
                "line, or leave zero-shot out with evaluator=[retrieval]"
            )
        if bad := [t for t in templates if "{}" not in t]:
            raise ConfigError(f"evaluator.zeroshot.templates: {bad[0]!r} has no {{}} for the class name: add it")
        return Classes(names, templates, own.subsets if own and not self.classnames else {})

    def _label(self, label: int | str | None, classes: Classes) -> int:
        source = self.classnames or "the data's class names"
        if label is None:
            raise ConfigError(
                "zero-shot needs labels and the held-out data has none: give data.label_column (csv) or data.label_key "
                "(webdataset), or leave zero-shot out with evaluator=[retrieval]"
            )
        if isinstance(label, str):
            if label not in classes.names:
                raise DataError(f"label {label!r} is not in {source}, which has {len(classes.names)} names: add it")
            return list(classes.names).index(label)
        if not 0 <= label < len(classes.names):
            raise DataError(
                f"label {label} is out of step with {source}: {len(classes.names)} names allow labels 0 to "
                f"{len(classes.names) - 1}"
            )
        return label


def _lines(path: str, key: str) -> Sequence[str]:
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"evaluator.zeroshot.{key}={path} cannot be read: {error.strerror}") from None
    lines = [line for line in lines if line]
    if not lines:
        raise ConfigError(f"evaluator.zeroshot.{key}={path} is empty: it needs one line for each entry")
    if key == "classnames" and len(set(lines)) < len(lines):
        twice = next(line for line in lines if lines.count(line) > 1)
        raise ConfigError(f"evaluator.zeroshot.classnames={path} names {twice!r} twice: class names must differ")
    return lines


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
