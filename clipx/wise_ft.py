"""`python -m clipx.wise_ft base=… finetuned=…`: models between one and its fine-tuned self (WiSE-FT, arXiv:2109.01903)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.cli import cli
from clipx.config.registry import MISSING, option
from clipx.data.spec import DataSpec, open_on_all_ranks
from clipx.distributed.spec import DistributedSpec
from clipx.errors import CheckpointError, ConfigError, require
from clipx.evaluator.spec import EvaluatorSpec
from clipx.precision.spec import PrecisionSpec
from clipx.report.figure import COLOURS, INK, MUTED, new_figure, style_axes, to_png

if TYPE_CHECKING:
    from clipx.config.lazy_torch import torch
    from clipx.distributed.comm import Comm
    from clipx.model.spec import ModelSpec
    from clipx.report.console import Screen
    from clipx.weights.load import Weights


@option("")
@dataclass(kw_only=True, slots=True)
class WiseFtSpec:
    """Two models of one architecture, and two sets to try each mixture of them on."""

    kind: str = "wise_ft"
    base: str = MISSING  # the weights that fine-tuning began with: what model.weights takes
    finetuned: str = MISSING  # the fine-tuned ones
    alphas: list[float] = field(default_factory=lambda: [i / 10 for i in range(11)])  # shares of the fine-tuned weights
    data: DataSpec = MISSING  # what was fine-tuned for
    reference: DataSpec = MISSING  # what should not be lost
    metric: str = "zeroshot/top1"  # of the evaluators, by which models are compared: more is better
    select: str = "best"  # which is written: best, by the mean of the metric over both sets; or one of the alphas
    out: str | None = None  # a folder for model.safetensors, wise_ft.json and wise_ft.png; null: nothing is written
    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)
    precision: PrecisionSpec = MISSING
    distributed: DistributedSpec = MISSING

    def __post_init__(self) -> None:
        require(
            len(self.alphas) > 0 and all(0 <= alpha <= 1 for alpha in self.alphas),
            f"alphas={self.alphas} must be numbers in [0, 1], the shares of the fine-tuned weights: [0,0.5,1]",
        )
        require(len(set(self.alphas)) == len(self.alphas), f"alphas={self.alphas} has one twice: leave it out")
        require(
            self.select == "best" or self.select in [f"{alpha:g}" for alpha in self.alphas],
            f"select={self.select} is neither best nor one of alphas={self.alphas}: give one of them",
        )
        require(
            self.select == "best" or self.out is not None,
            f"select={self.select} has no effect without out=FOLDER: give one, or leave it out",
        )
        name, _, of = self.metric.partition("/")
        require(
            bool(of) and name in self.evaluator,
            f"metric={self.metric} is no number of evaluator=[{','.join(self.evaluator)}]: give EVALUATOR/NUMBER, as "
            "zeroshot/top1",
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One mixture, and what it scored: all numbers of either set, and of those the metric."""

    alpha: float
    target: dict[str, float]
    reference: dict[str, float]
    metric: str

    @property
    def scores(self) -> tuple[float, float]:
        """On the target and on the reference."""
        return self.target[f"eval/{self.metric}"], self.reference[f"eval/{self.metric}"]

    @property
    def mean(self) -> float:
        return sum(self.scores) / 2


def wise_ft(spec: WiseFtSpec) -> None:
    """Prints a table, and writes the chosen model, JSON and a picture where `out` says so. Collective."""
    out = None if spec.out is None else Path(spec.out)
    if out is not None and out.exists():
        raise CheckpointError(f"out={out} is there already: give another name, or remove it")
    from clipx.report.console import Screen
    from clipx.weights.load import find

    comm = spec.distributed.build()
    try:
        zero, fine = find(spec.base), find(spec.finetuned)
        check_mixable(zero, fine)
        points = list(_curve(spec, zero, fine, comm))
        chosen = _chosen(points, spec.select)
        if comm.is_main:
            screen = Screen(True)
            _show(screen, spec, points, chosen)
            if out is not None:
                _write(out, spec, points, chosen, mixed(zero, fine, chosen.alpha))
                screen.print(f"written  alpha {chosen.alpha:g} to {out}: model.weights={out / 'model.safetensors'}")
        comm.barrier()
    finally:
        comm.close()


# ------------------------------------------------------------------------------------------------------- the models


def mixed(zero: Weights, fine: Weights, alpha: float) -> Weights:
    """(1 - alpha) · zero + alpha · fine, BatchNorm's averages too; at 0 and 1 exactly one of them. Counts: fine's."""
    from clipx.config.lazy_torch import torch
    from clipx.weights.load import Weights

    def between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not b.is_floating_point():
            return b
        wide = torch.promote_types(b.dtype, torch.float32)
        return torch.lerp(a.to(wide), b.to(wide), alpha).to(b.dtype)

    tensors = {name: between(zero.model[name], fine.model[name]) for name in fine.model}
    scale = _between(zero.log_scale, fine.log_scale, alpha)
    return Weights(
        f"{alpha:g} of the way to {fine.place}", tensors, fine.spec, scale, _between(zero.bias, fine.bias, alpha)
    )


def _between(zero: float | None, fine: float | None, alpha: float) -> float | None:
    if zero is None or fine is None:
        return zero if fine is None else fine
    return (1 - alpha) * zero + alpha * fine


def check_mixable(zero: Weights, fine: Weights) -> None:
    """Raises ConfigError unless both are one architecture, to the last option that has a part in what it computes."""
    from clipx.weights.compare import check_same

    between = f"base={zero.place} and finetuned={fine.place} are not one architecture"
    try:
        check_same(_spec(fine), _spec(zero), f"base={zero.place}")
    except CheckpointError as error:
        raise ConfigError(f"{between}: {error}") from None
    names = sorted(zero.model.keys() ^ fine.model.keys())
    require(not names, f"{between}: {', '.join(names[:3])} is in one alone: fine-tune that one model")
    for name in fine.model:
        shapes = [list(weights.model[name].shape) for weights in (zero, fine)]
        require(shapes[0] == shapes[1], f"{between}: {name} has {shapes[0]} and {shapes[1]}: fine-tune that one model")


def _spec(weights: Weights) -> ModelSpec:
    if weights.spec is None:
        raise ConfigError(
            f"{weights.place} has no model configuration with it: give a run directory, or an exported model"
        )
    return weights.spec


# ---------------------------------------------------------------------------------------------------- what they score


def _curve(spec: WiseFtSpec, zero: Weights, fine: Weights, comm: Comm) -> Iterator[Point]:
    """Collective."""
    from clipx.evaluator.base import Embedder
    from clipx.evaluator.suite import Suite
    from clipx.model.blocks import named_blocks
    from clipx.weights.load import load

    model_spec = _spec(fine)
    sets = (spec.data, spec.reference)
    suites = [Suite.open(spec.evaluator, data, open_on_all_ranks(data, comm), comm) for data in sets]
    precision = spec.precision.build(comm.device)
    for alpha in sorted(spec.alphas):
        model = model_spec.build(comm.device, precision.dtype)
        load(model, mixed(zero, fine, alpha))
        spec.precision.convert(named_blocks(model))
        embedder = Embedder.build(model, model_spec, spec.data, comm, precision, lambda bad: None)
        target, reference = (suite.evaluate(list(spec.evaluator), embedder) for suite in suites)
        for numbers in (target, reference):
            require(
                f"eval/{spec.metric}" in numbers,
                f"metric={spec.metric} is not among what was measured: give one of "
                f"{', '.join(name.removeprefix('eval/') for name in numbers)}",
            )
        yield Point(alpha, target, reference, spec.metric)


def _chosen(points: Sequence[Point], select: str) -> Point:
    """The best by the mean of both sets, of equals the one nearest to where fine-tuning began; or the one named."""
    if select == "best":
        return max(points, key=lambda point: point.mean)
    return next(point for point in points if f"{point.alpha:g}" == select)


# ------------------------------------------------------------------------------------------------------ what is told


def _show(screen: Screen, spec: WiseFtSpec, points: Sequence[Point], chosen: Point) -> None:
    screen.print(f"{spec.metric}: {spec.data.name} is what was fine-tuned for, {spec.reference.name} the reference")
    width = max(len(spec.data.name), len(spec.reference.name), 7)
    screen.print(f"alpha  {spec.data.name:>{width}}  {spec.reference.name:>{width}}  {'mean':>{width}}")
    for point in points:
        numbers = "  ".join(f"{value:{width}.2%}" for value in (*point.scores, point.mean))
        screen.print(f"{point.alpha:5g}  {numbers}{'  <' if point is chosen else ''}")


def _write(out: Path, spec: WiseFtSpec, points: Sequence[Point], chosen: Point, weights: Weights) -> None:
    """The folder is whole or not there."""
    from clipx.weights.load import write

    place = out.with_name(f".{out.name}.{os.getpid()}")
    place.mkdir(parents=True)
    write(place / "model.safetensors", weights, None)
    found: dict[str, Any] = {
        "zero": spec.base,
        "fine": spec.finetuned,
        "metric": spec.metric,
        "chosen": chosen.alpha,
        "points": [
            {"alpha": p.alpha, "data": _short(p.target), "reference": _short(p.reference), "mean": p.mean}
            for p in points
        ],
    }
    (place / "wise_ft.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (place / "wise_ft.png").write_bytes(draw(spec.metric, spec.data.name, spec.reference.name, points, chosen))
    place.rename(out)


def _short(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in numbers.items()}


def draw(metric: str, target: str, reference: str, points: Sequence[Point], chosen: Point) -> bytes:
    """The curve as PNG: one set against the other, each alpha beside its point."""
    figure = new_figure(f"{metric}, %", 6.4, 5.2)
    axes = figure.subplots()
    style_axes(axes, f"chosen is alpha {chosen.alpha:g}")
    axes.set_xlabel(f"{reference}: the reference", color=MUTED, fontsize=9)
    axes.set_ylabel(f"{target}: fine-tuned for", color=MUTED, fontsize=9)
    axes.margins(0.12)
    places = [(100 * point.scores[1], 100 * point.scores[0]) for point in points]
    axes.plot(*zip(*places, strict=True), color=COLOURS[0], lw=1.4, marker="o", ms=5)
    for point, place in zip(points, places, strict=True):
        if point is chosen:
            axes.plot(*place, marker="o", ms=11, mfc="none", mec=COLOURS[1], mew=2)
        axes.annotate(f"{point.alpha:g}", place, (7, 6), textcoords="offset points", fontsize=9, color=INK)
    return to_png(figure)


main = cli(wise_ft, "wise_ft")

if __name__ == "__main__":
    main()
