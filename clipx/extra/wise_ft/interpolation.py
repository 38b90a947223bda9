"""Interpolation between a model and its fine-tuned version (WiSE-FT, arXiv:2109.01903), and its evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.errors import CheckpointError, ConfigError, require
from clipx.evaluator.base import Embedder
from clipx.evaluator.suite import Suite
from clipx.model.spec import ModelSpec
from clipx.report.console import Progress, of_samples
from clipx.report.figure import COLOURS, INK, MUTED, attempt, new_figure, style_axes, to_png
from clipx.weights.compare import check_same
from clipx.weights.export import atomic_output
from clipx.weights.load import LoadedWeights, load_into, save_weights

if TYPE_CHECKING:
    from clipx.extra.wise_ft.command import WiseFtSpec
    from clipx.extra.wise_ft.soup import Average


@dataclass(frozen=True, slots=True)
class ScoredMixture:
    """Results of a mixture. alpha: share of the fine-tuned weights. target, reference: metrics of each data set."""

    alpha: float
    target: dict[str, float]
    reference: dict[str, float]
    metric: str

    @property
    def scores(self) -> tuple[float, float]:
        """Value of the metric on the target and on the reference."""
        return self.target[f"eval/{self.metric}"], self.reference[f"eval/{self.metric}"]

    @property
    def mean(self) -> float:
        return sum(self.scores) / 2


def interpolate(base: LoadedWeights, finetuned: LoadedWeights, alpha: float) -> LoadedWeights:
    """Returns (1 - alpha) · base + alpha · finetuned, BatchNorm's averages included. Exact at alpha 0 and 1.

    Integers, such as BatchNorm's counts, are taken from the fine-tuned model.
    """
    if base is finetuned:
        return finetuned

    def lerp(a: Tensor, b: Tensor) -> Tensor:
        if not b.is_floating_point():
            return b
        wide = torch.promote_types(b.dtype, torch.float32)
        return torch.lerp(a.to(wide), b.to(wide), alpha).to(b.dtype)

    def lerp_optional(a: float | None, b: float | None) -> float | None:
        if a is None or b is None:
            return a if b is None else b
        return (1 - alpha) * a + alpha * b

    return LoadedWeights(
        f"mixture of {base.location} and {finetuned.location} at alpha {alpha:g}",
        {name: lerp(base.model[name], tensor) for name, tensor in finetuned.model.items()},
        finetuned.spec,
        lerp_optional(base.log_scale, finetuned.log_scale),
        lerp_optional(base.bias, finetuned.bias),
    )


def check_mixable(base: LoadedWeights, finetuned: LoadedWeights) -> None:
    """Raises ConfigError unless both models agree in every option that affects their function."""
    between = f"base={base.location} and finetuned={finetuned.location} are different models"
    assert base.spec is not None and finetuned.spec is not None
    try:
        check_same(finetuned.spec, base.spec, f"base={base.location}")
    except CheckpointError as error:
        raise ConfigError(f"{between}: {error}") from None
    names = sorted(base.model.keys() ^ finetuned.model.keys())
    require(not names, f"{between}: only one has {', '.join(names[:3])}: give a base and its fine-tuned version")
    for name in finetuned.model:
        shapes = [list(weights.model[name].shape) for weights in (base, finetuned)]
        require(
            shapes[0] == shapes[1],
            f"{between}: {name} has shapes {shapes[0]} and {shapes[1]}: give a base and its fine-tuned version",
        )


def score_mixtures(
    spec: WiseFtSpec, model: ModelSpec, base: LoadedWeights, finetuned: LoadedWeights, comm: Comm
) -> Iterator[ScoredMixture]:
    """Evaluates the mixture of each alpha, in ascending order. Collective."""
    sets = (spec.data, spec.reference)
    suites = [Suite.open(spec.evaluator, data, None, comm) for data in sets]
    for progress, alpha in Progress(shown=comm.is_main).numbered(sorted(spec.alphas), "mixture"):
        mixture = interpolate(base, finetuned, alpha)
        target, reference = (evaluate(spec, model, mixture, suite, comm, progress) for suite in suites)
        yield ScoredMixture(alpha, target, reference, spec.metric)


def evaluate(
    spec: WiseFtSpec, model: ModelSpec, weights: LoadedWeights, suite: Suite, comm: Comm, progress: Progress
) -> dict[str, float]:
    """Returns the metrics of weights on the data of `suite`. Raises ConfigError without `metric`. Collective."""
    fill = partial(load_into, weights=weights)
    embedder = Embedder.of_weights(model, fill, spec.number_format, spec.data, comm, lambda bad: None, progress)
    numbers = suite.evaluate(list(spec.evaluator), embedder)
    require(
        f"eval/{spec.metric}" in numbers,
        f"metric={spec.metric} was not measured: give one of "
        f"{', '.join(name.removeprefix('eval/') for name in numbers)}",
    )
    return numbers


def choose_mixture(mixtures: Sequence[ScoredMixture], choose: str) -> ScoredMixture:
    """Selects the mixture of alpha `choose`, or for `best` the one with the largest mean of both data sets.

    Of equal means, selects the smallest alpha.
    """
    if choose == "best":
        return max(mixtures, key=lambda mixture: mixture.mean)
    return next(mixture for mixture in mixtures if f"{mixture.alpha:g}" == choose)


def write_mixture(
    out: Path,
    spec: WiseFtSpec,
    mixtures: Sequence[ScoredMixture],
    chosen: ScoredMixture,
    base: LoadedWeights,
    soup: Average,
) -> None:
    """Writes a folder with the selected model, the metrics and the plot, atomically."""
    numbers: dict[str, Any] = {
        "zero": spec.base,
        "fine": spec.finetuned,
        "metric": spec.metric,
        "chosen": chosen.alpha,
        "points": [
            {"alpha": m.alpha, "data": _short(m.target), "reference": _short(m.reference), "mean": m.mean}
            for m in mixtures
        ],
        **({"soup": {"kind": str(spec.soup), "models": [asdict(one) for one in soup.members]}} if soup.members else {}),
    }
    weights = interpolate(base, soup.weights, chosen.alpha)
    with atomic_output(out) as folder:
        folder.mkdir()
        save_weights(folder / "model.safetensors", weights, None)
        (folder / "wise_ft.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        names = spec.data.name, spec.reference.name
        plot = attempt("the plot", lambda: plot_mixtures(spec.metric, *names, mixtures, chosen))
        if plot is not None:
            (folder / "wise_ft.png").write_bytes(plot)


def _short(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in numbers.items()}


def plot_mixtures(
    metric: str, target: str, reference: str, mixtures: Sequence[ScoredMixture], chosen: ScoredMixture
) -> bytes:
    """Returns a plot as PNG: metric on the target over metric on the reference, with each alpha labeled."""
    figure = new_figure(metric, 6.4, 5.2)
    axes = figure.subplots()
    style_axes(axes, f"selected: alpha {chosen.alpha:g}")
    of = [of_samples(f"eval/{metric}", numbers) for numbers in (chosen.reference, chosen.target)]
    axes.set_xlabel(f"{reference} (reference), %{of[0]}", color=MUTED, fontsize=9)
    axes.set_ylabel(f"{target} (target of fine-tuning), %{of[1]}", color=MUTED, fontsize=9)
    axes.margins(0.12)
    positions = [(100 * mixture.scores[1], 100 * mixture.scores[0]) for mixture in mixtures]
    axes.plot(*zip(*positions, strict=True), color=COLOURS[0], lw=1.4, marker="o", ms=5)
    for mixture, position in zip(mixtures, positions, strict=True):
        if mixture is chosen:
            axes.plot(*position, marker="o", ms=11, mfc="none", mec=COLOURS[1], mew=2)
        axes.annotate(f"{mixture.alpha:g}", position, (7, 6), textcoords="offset points", fontsize=9, color=INK)
    return to_png(figure)
