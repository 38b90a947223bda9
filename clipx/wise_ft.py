"""`python -m clipx.wise_ft base=… finetuned=…`: interpolates between a model and its fine-tuned version.

WiSE-FT, arXiv:2109.01903.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.cli import cli, imports
from clipx.config.registry import MISSING, option
from clipx.data.spec import DataSpec
from clipx.distributed.spec import DistributedSpec
from clipx.errors import CheckpointError, require
from clipx.evaluator.spec import EvaluatorSpec
from clipx.precision.spec import PrecisionSpec
from clipx.report.console import Screen

if TYPE_CHECKING:
    from clipx.weights.interpolation import ScoredMixture


@option("")
@dataclass(kw_only=True, slots=True)
class WiseFtSpec:
    """Options of clipx.wise_ft: two models of one architecture, and two data sets to evaluate their mixtures."""

    kind: str = "wise_ft"
    """Name of this command's options. The key itself cannot be set."""

    base: str = MISSING
    """Weights with which fine-tuning began: any value of model.weights."""

    finetuned: str = MISSING
    """Fine-tuned weights: any value of model.weights."""

    alphas: list[float] = field(default_factory=lambda: [i / 10 for i in range(11)])
    """Shares of the fine-tuned weights in the mixtures, different numbers in [0, 1]. 0: base, 1: finetuned."""

    data: DataSpec = MISSING
    """Data set that the model was fine-tuned for."""

    reference: DataSpec = MISSING
    """Data set on which the fine-tuned model should not become worse."""

    metric: str = "zeroshot/top1"
    """Metric by which mixtures are compared, as EVALUATOR/METRIC of the group evaluator. Larger is better."""

    select: str = "best"
    """Mixture that is written to `out`: `best`, which has the largest mean of the metric over both data sets (of equals
    the smallest alpha), or one of the alphas. An alpha needs `out`."""

    out: str | None = None
    """Output folder for model.safetensors, wise_ft.json and wise_ft.png. It must not exist. null: no output."""

    evaluator: dict[str, EvaluatorSpec] = field(default_factory=dict)
    """Evaluators by name, selected by evaluator=[zeroshot,retrieval]."""

    precision: PrecisionSpec = MISSING
    """Number format of the towers."""

    distributed: DistributedSpec = MISSING
    """Processes and devices."""

    def __post_init__(self) -> None:
        require(
            len(self.alphas) > 0 and all(0 <= alpha <= 1 for alpha in self.alphas),
            f"alphas={self.alphas} must be numbers in [0, 1], the shares of the fine-tuned weights: e.g. [0,0.5,1]",
        )
        require(len(set(self.alphas)) == len(self.alphas), f"alphas={self.alphas} has duplicates: remove them")
        require(
            self.select == "best" or self.select in [f"{alpha:g}" for alpha in self.alphas],
            f"select={self.select} is neither best nor one of alphas={self.alphas}: give one of them",
        )
        require(
            self.select == "best" or self.out is not None,
            f"select={self.select} has no effect without out=FOLDER: add it, or remove select",
        )
        name, _, metric = self.metric.partition("/")
        require(
            bool(metric) and name in self.evaluator,
            f"metric={self.metric} is not a metric of evaluator=[{','.join(self.evaluator)}]: give EVALUATOR/METRIC, "
            "e.g. zeroshot/top1",
        )


def wise_ft(spec: WiseFtSpec) -> None:
    """Evaluates the mixtures, prints a table, and writes the selected model, JSON and a plot to `out`. Collective."""
    out = None if spec.out is None else Path(spec.out)
    if out is not None and out.exists():
        raise CheckpointError(f"out={out} exists already: give another name, or remove it")
    with imports():
        from clipx.weights.interpolation import (
            check_mixable,
            choose_mixture,
            interpolate,
            score_mixtures,
            write_mixture,
        )
        from clipx.weights.load import load_with_spec

    comm = spec.distributed.build()
    try:
        (base, _), (finetuned, model) = load_with_spec(spec.base, "base"), load_with_spec(spec.finetuned, "finetuned")
        check_mixable(base, finetuned)
        mixtures = list(score_mixtures(spec, model, base, finetuned, comm))
        chosen = choose_mixture(mixtures, spec.select)
        if comm.is_main:
            screen = Screen(True)
            _show(screen, spec, mixtures, chosen)
            if out is not None:
                write_mixture(out, spec, mixtures, chosen, interpolate(base, finetuned, chosen.alpha))
                screen.print(f"written  alpha {chosen.alpha:g} to {out}: model.weights={out / 'model.safetensors'}")
        comm.barrier()
    finally:
        comm.close()


def _show(screen: Screen, spec: WiseFtSpec, mixtures: Sequence[ScoredMixture], chosen: ScoredMixture) -> None:
    screen.print(f"{spec.metric}: {spec.data.name} is the fine-tuning data, {spec.reference.name} the reference")
    width = max(len(spec.data.name), len(spec.reference.name), 7)
    screen.print(f"alpha  {spec.data.name:>{width}}  {spec.reference.name:>{width}}  {'mean':>{width}}")
    for mixture in mixtures:
        numbers = "  ".join(f"{value:{width}.2%}" for value in (*mixture.scores, mixture.mean))
        screen.print(f"{mixture.alpha:5g}  {numbers}{'  <' if mixture is chosen else ''}")


main = cli(wise_ft, "wise_ft")

if __name__ == "__main__":
    main()
