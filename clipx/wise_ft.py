"""`python -m clipx.wise_ft base=… finetuned=…`: models between one and its fine-tuned self (WiSE-FT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.cli import cli
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


def wise_ft(spec: WiseFtSpec) -> None:
    """Prints a table, and writes the chosen model, JSON and a plot where `out` says so. Collective."""
    out = None if spec.out is None else Path(spec.out)
    if out is not None and out.exists():
        raise CheckpointError(f"out={out} is there already: give another name, or remove it")
    from clipx.weights.interpolation import check_mixable, choose_mixture, interpolate, score_mixtures, write_mixture
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
    screen.print(f"{spec.metric}: {spec.data.name} is what was fine-tuned for, {spec.reference.name} the reference")
    width = max(len(spec.data.name), len(spec.reference.name), 7)
    screen.print(f"alpha  {spec.data.name:>{width}}  {spec.reference.name:>{width}}  {'mean':>{width}}")
    for mixture in mixtures:
        numbers = "  ".join(f"{value:{width}.2%}" for value in (*mixture.scores, mixture.mean))
        screen.print(f"{mixture.alpha:5g}  {numbers}{'  <' if mixture is chosen else ''}")


main = cli(wise_ft, "wise_ft")

if __name__ == "__main__":
    main()
