"""Linear probe: accuracy of a linear classifier on frozen image embeddings (CLIP, arXiv:2103.00020, A.3).

Shape suffixes: N images, n images of a block, C classes, D embedding plus one constant feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipx.config.lazy_torch import torch
from clipx.config.options import option
from clipx.config.registry import frozen, register
from clipx.data.spec import Dataset
from clipx.errors import ConfigError, DataError
from clipx.evaluator.spec import EvaluatorSpec

if TYPE_CHECKING:
    from clipx.data.source import Source
    from clipx.distributed.comm import Comm
    from clipx.evaluator.base import Embedded, Embedder, Metrics

_BLOCK = 8192  # images per matrix product
_PER_DECADE = 8  # smallest step of the search for λ, as a fraction of a decade
_MAX_ITERATIONS = 1000  # of L-BFGS for each fit
_FIRST = (-6, -4, -2, 0, 2, 4, 6)  # powers of ten of the first candidates for λ; the search then refines the best one


@register("evaluator")
@frozen
class LinearProbeSpec(EvaluatorSpec):
    """Multinomial logistic regression on frozen image embeddings, by L-BFGS in float64 with an L2 penalty λ.

    λ is selected on a validation part of the training images; the final classifier is trained on all of them. The
    result does not depend on the number of ranks.
    """

    learns: ClassVar[bool] = True
    compared: ClassVar[tuple[str, ...]] = ("top1", "top5", "mean_per_class_recall")
    metrics: ClassVar[tuple[str, ...]] = (*compared, "chance", "l2")

    kind: str = "linear_probe"
    """Kind of evaluator: linear_probe."""

    train_samples: int | None = option(None, ge=1)
    """Number of training images to learn from, evenly spaced over the training data. null: all images."""

    validation_share: float = option(0.2, gt=0, le=0.5, when="not l2", hint="0.2 is every fifth image")
    """Share of the training images of each class that validate the candidates for λ. The default is every fifth
    image."""

    l2: float | None = option(None, gt=0, hint="null selects it automatically")
    """Penalty λ of the loss Σ cross-entropy + λ/2·‖W‖²; the inverse of scikit-learn's C. null: selects the λ
    in [1e-6, 1e6] with the highest validation accuracy, by the search of arXiv:2103.00020, A.3."""

    def check(self, data: Dataset) -> None:
        """Raises ConfigError if labels are missing, or if no class has both training and held-out images."""
        from clipx.evaluator.base import PREVIEW_SAMPLES, preview

        assert data.held_out is not None
        train, held_out = ({sample.label for sample in preview(source)} for source in (data.train, data.held_out))
        if None in train | held_out:
            raise ConfigError(
                "the linear probe needs labels, and the data has none: give data.label_column (csv) or "
                "data.label_key (webdataset), or drop the probe with evaluator=[zeroshot]"
            )
        if not train & held_out and data.classes is not None and len(data.classes.names) <= PREVIEW_SAMPLES:
            raise ConfigError(
                "the linear probe needs classes with both training and held-out images, and the data has none: choose "
                "other data, or drop the probe with evaluator=[zeroshot]"
            )

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """Returns top1, top5, mean_per_class_recall and chance over the classes of the training images, and l2, the λ
        that was used. Collective."""
        from clipx.evaluator.zeroshot import scores

        assert data.held_out is not None
        train, test = (embedder.images(s, self.batch_size) for s in (self._train(data), data.held_out))
        classes = {label: i for i, label in enumerate(sorted(set(train.labels), key=str))}
        if len(classes) < 2:
            raise DataError(f"the training images have {len(classes)} class only: the linear probe needs two or more")
        x_ND, y_N = _tensors(train, classes)
        finite_N = x_ND.isfinite().all(1)
        if not finite_N.any():
            raise DataError("no embedding of a training image is finite: the linear probe has nothing to fit")
        if not finite_N.all():  # a single one that is not would leave no weight finite
            x_ND, y_N = x_ND[finite_N], y_N[finite_N]
        probe = Probe(embedder.comm, len(classes), embedder.heartbeat)
        l2 = self.l2 or self._best(probe, x_ND, y_N)
        weight_CD = probe.fit(x_ND, y_N, l2)
        test_ND, labels_N = _tensors(test, classes)
        return {**scores((test_ND @ weight_CD.T).cpu(), labels_N.cpu()), "l2": l2}

    def _train(self, data: Dataset) -> Source:
        from clipx.data.source import Split

        total = sum(data.train.sizes)
        if self.train_samples is None or self.train_samples >= total:
            return data.train
        return Split(data.train, self.train_samples, total, held_out=True)

    def _best(self, probe: Probe, x_ND: torch.Tensor, y_N: torch.Tensor) -> float:
        """Returns the λ with the highest validation accuracy; candidates are fitted to the other training images."""
        held_N = _every_of_class(y_N, round(1 / self.validation_share))
        if not held_N.any():
            raise DataError(
                f"evaluator.linear_probe.validation_share={self.validation_share} selects no image, because the "
                "classes have too few training images: raise it, or give evaluator.linear_probe.l2"
            )
        rest, held = (x_ND[~held_N], y_N[~held_N]), (x_ND[held_N], y_N[held_N])

        def accuracy(l2: float) -> float:
            weight_CD = probe.fit(*rest, l2)
            return ((held[0] @ weight_CD.T).argmax(1) == held[1]).double().mean().item()

        return search(accuracy)


def search(score: Callable[[float], float]) -> float:
    """Returns the λ with the highest score, by the search of CLIP's authors.

    Candidates are powers of 100 from 1e-6 to 1e6, then values next to the best one, with steps halved down to an eighth
    of a decade. Among equal scores the largest λ is selected, which regularizes most.
    """
    found: dict[int, float] = {}

    def best(candidates: Sequence[int]) -> int:
        for step in candidates:
            if step not in found:
                found[step] = score(10 ** (step / _PER_DECADE))
        return max(found, key=lambda step: (found[step], step))

    low, high = _FIRST[0] * _PER_DECADE, _FIRST[-1] * _PER_DECADE
    at = best([power * _PER_DECADE for power in _FIRST])
    span = _PER_DECADE
    while span >= 1:
        at = best([step for step in (at - span, at + span) if low <= step <= high])
        span //= 2
    return float(10 ** (at / _PER_DECADE))


@dataclass(frozen=True, slots=True)
class Probe:
    """Fits a classifier of C classes, with the blocks of images distributed over the ranks."""

    comm: Comm
    classes: int
    heartbeat: Callable[[], None]

    def fit(self, x_ND: torch.Tensor, y_N: torch.Tensor, l2: float) -> torch.Tensor:
        """Returns the weights [C, D] that minimize Σ cross-entropy + λ/2·‖W‖². Collective.

        W excludes the weights of the constant feature.
        """
        with torch.inference_mode(False), torch.enable_grad():
            weight_CD = torch.zeros(self.classes, x_ND.shape[1], dtype=x_ND.dtype, device=x_ND.device)
            weight_CD.requires_grad_()
            optimizer = torch.optim.LBFGS(
                [weight_CD],
                max_iter=_MAX_ITERATIONS,
                tolerance_grad=1e-6,
                tolerance_change=1e-12,
                line_search_fn="strong_wolfe",
            )

            def closure() -> torch.Tensor:
                self.heartbeat()
                loss, grad_CD = self._loss(weight_CD.detach(), x_ND, y_N, l2)
                weight_CD.grad = grad_CD
                return loss

            optimizer.step(closure)
            return weight_CD.detach()

    def _loss(
        self, weight_CD: torch.Tensor, x_ND: torch.Tensor, y_N: torch.Tensor, l2: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss divided by N, and its gradient [C, D]."""
        from clipx.evaluator.base import rank_blocks

        grad_CD, loss = torch.zeros_like(weight_CD), weight_CD.new_zeros(1)
        for block in rank_blocks(len(x_ND), _BLOCK, self.comm):
            log_nC = torch.log_softmax(x_ND[block] @ weight_CD.T, dim=1)
            rows = torch.arange(len(log_nC), device=log_nC.device)
            loss -= log_nC[rows, y_N[block]].sum()
            wrong_nC = log_nC.exp()
            wrong_nC[rows, y_N[block]] -= 1
            grad_CD += wrong_nC.T @ x_ND[block]
        penalised_CD = weight_CD.clone()
        penalised_CD[:, -1] = 0
        loss = self.comm.sum(loss)[0] + l2 / 2 * penalised_CD.square().sum()
        return loss / len(x_ND), (self.comm.sum(grad_CD) + l2 * penalised_CD) / len(x_ND)


def _tensors(embedded: Embedded, classes: dict[int | str | None, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the features [N, D] in float64, embeddings with an appended 1, and the class indices [N].

    Raises DataError if a label is not in `classes`.
    """
    unknown = next((label for label in embedded.labels if label not in classes), None)
    if unknown is not None:
        raise DataError(
            f"label {unknown!r} of held-out data has no training image: the linear probe needs images of every class"
        )
    image_ND = embedded.image.double()
    labels_N = torch.tensor([classes[label] for label in embedded.labels], device=image_ND.device)
    return torch.cat([image_ND, image_ND.new_ones(len(image_ND), 1)], 1), labels_N


def _every_of_class(y_N: torch.Tensor, every: int) -> torch.Tensor:
    """Returns a mask [N] of every `every`-th image of each class: number every, 2·every, …"""
    order_N = torch.argsort(y_N, stable=True)
    counts_C = torch.bincount(y_N)
    starts_C = counts_C.cumsum(0) - counts_C
    number_N = torch.empty_like(y_N)
    number_N[order_N] = torch.arange(len(y_N), device=y_N.device) - starts_C.repeat_interleave(counts_C)
    return number_N % every == every - 1
