"""`python -m clipx.wise_ft base=… finetuned=…`: averages the weights of a model and of its fine-tuned versions.

WiSE-FT, arXiv:2109.01903; model soups, arXiv:2203.05482.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipx.cli import cli, imports
from clipx.command_spec import UNUSED_WITH_EVALUATOR, ModelCommandSpec
from clipx.config.options import typed
from clipx.config.registry import MISSING, complete, frozen, option, register
from clipx.data.spec import DataSpec
from clipx.errors import CheckpointError, require, require_effect
from clipx.evaluator.spec import check_data, check_set
from clipx.report.console import Screen, of_samples
from clipx.weights.spec import check_exists

if TYPE_CHECKING:
    from clipx.extra.wise_ft.interpolation import ScoredMixture
    from clipx.extra.wise_ft.soup import Average


_ALPHAS = [i / 10 for i in range(11)]


class Soup(StrEnum):
    """Averages of several fine-tuned models (model soups, arXiv:2203.05482)."""

    none = "none"
    """One fine-tuned model."""

    uniform = "uniform"
    """The mean of all models."""

    greedy = "greedy"
    """Models in descending order of the metric, each added if the mean with it is not worse."""


@register("")
@frozen
class WiseFtSpec(ModelCommandSpec):
    """Options of clipx.wise_ft: models of one architecture, and two data sets to evaluate their mixtures."""

    kind: str = "wise_ft"
    """Name of this command's options. The key itself cannot be set."""

    base: str | None = None
    """Weights with which fine-tuning began: any value of model.weights. null: none, only with a soup, which is then not
    interpolated."""

    finetuned: Any = MISSING  # OmegaConf has no type for a string or a list
    """Fine-tuned weights: any value of model.weights; or those of several runs, [A,B,C], for a soup."""

    soup: Soup = Soup.none
    """Average of several fine-tuned models, which then takes the place of one (arXiv:2203.05482). uniform: the mean of
    all. greedy: in descending order of `metric` on `data`, each model is added if the metric does not become worse.
    none: finetuned is one model."""

    alphas: list[float] = option(_ALPHAS, ge=0, le=1, when="base", hint="give shares of the fine-tuned weights")
    """Shares of the fine-tuned weights in the mixtures, different numbers. 0: base, 1: finetuned. Without base: [1]."""

    data: DataSpec = MISSING
    """Set of the task of the fine-tuning. It is evaluated as a whole, unless it defines held-out data."""

    reference: DataSpec = MISSING
    """Set on which the fine-tuned model should not become worse, evaluated like `data`."""

    metric: str = "zeroshot/top1"
    """Metric by which mixtures are compared, as EVALUATOR/METRIC of the group evaluator. Larger is better."""

    select: str = option("best", when="out")
    """Mixture that is written to `out`: `best`, which has the largest mean of the metric over both data sets (of equals
    the smallest alpha), or one of the alphas."""

    out: str | None = None
    """Output folder for model.safetensors, wise_ft.json, which also lists the models of a soup, and wise_ft.png. It
    must not exist. null: no output."""

    @property
    def members(self) -> list[str]:
        """The fine-tuned models."""
        return list(self.finetuned) if isinstance(self.finetuned, list) else [self.finetuned]

    def _check_soup(self) -> None:
        shown, number = f"finetuned={typed(self.finetuned)}", len(self.members)
        require(
            all(isinstance(member, str) and member for member in self.members),
            f"{shown} must be a model, or a list of models: [outputs/A,outputs/B]",
        )
        several = "give several, [outputs/A,outputs/B]"
        require_effect(self.soup is Soup.none or number > 1, f"soup={self.soup}", f"with one model, {shown}", several)
        require(
            self.soup is not Soup.none or number == 1,
            f"{shown} are {number} models: give soup=uniform or soup=greedy, or one model",
        )
        require(len(set(self.members)) == number, f"{shown} has a model twice: give each once")
        require(
            self.base is not None or self.soup is not Soup.none,
            "base=null leaves nothing to interpolate: give base=…, or several models and soup=greedy",
        )

    def __post_init__(self) -> None:
        ModelCommandSpec.__post_init__(self)
        self._check_soup()
        if self.base is None:
            complete(self, alphas=[1.0])
        alphas = [f"{alpha:g}" for alpha in self.alphas]
        different = 0 < len(alphas) == len(set(self.alphas))
        require(different, f"alphas={typed(self.alphas)} must be different numbers: e.g. [0,0.5,1]")
        require(
            self.select in ("best", *alphas),
            f"select={self.select} is neither best nor one of alphas={typed(self.alphas)}: give one of them",
        )
        for key, data in (("data", self.data), ("reference", self.reference)):
            check_set(key, data, any(evaluator.learns for evaluator in self.evaluator.values()))
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
    files = spec.distributed.check_launch().world == 1
    for data in (spec.data, spec.reference):
        check_data(data, spec.evaluator, files)
    for key, location in [("base", spec.base), *(("finetuned", member) for member in spec.members)]:
        if location is not None:
            check_exists(location, key)
    with imports():
        from clipx.extra.wise_ft.interpolation import check_mixable, choose_mixture, score_mixtures, write_mixture
        from clipx.extra.wise_ft.soup import mix
        from clipx.weights.load import load_all_with_specs

    with spec.distributed.joined() as comm:
        places = [("finetuned", location) for location in spec.members]
        models = load_all_with_specs([*places, *([] if spec.base is None else [("base", spec.base)])], spec)
        finetuned, model = models[0]
        base = finetuned if spec.base is None else models.pop()[0]
        for member, _ in models:
            check_mixable(base, member)
        soup = mix(spec, model, [member for member, _ in models], comm)
        mixtures = list(score_mixtures(spec, model, base, soup.weights, comm))
        chosen = choose_mixture(mixtures, spec.select)
        if comm.is_main:
            screen = Screen(True)
            _show_soup(screen, soup)
            _show(screen, spec, mixtures, chosen)
            if out is not None:
                write_mixture(out, spec, mixtures, chosen, base, soup)
                screen.print(f"written  alpha {chosen.alpha:g} to {out}: model.weights={out / 'model.safetensors'}")


def _show_soup(screen: Screen, soup: Average) -> None:
    for member in soup.members:
        of = "" if member.samples is None else f" of {member.samples:,.0f}"
        score = "" if member.score is None else f"  {member.score:.2%}{of}"
        tried = "" if member.mixed_score is None else f"  with it {member.mixed_score:.2%}"
        screen.print(f"soup     {'added  ' if member.chosen else 'skipped'}{score}{tried}  {member.location}")


def _show(screen: Screen, spec: WiseFtSpec, mixtures: Sequence[ScoredMixture], chosen: ScoredMixture) -> None:
    screen.print(f"{spec.metric}: {spec.data.name} is the fine-tuning data, {spec.reference.name} the reference")
    of = [of_samples(f"eval/{spec.metric}", numbers) for numbers in (mixtures[0].target, mixtures[0].reference)]
    names = f"{spec.data.name}{of[0]}", f"{spec.reference.name}{of[1]}", "mean"
    width = max(7, *map(len, names))
    screen.print("  ".join(("alpha", *(f"{name:>{width}}" for name in names))))
    for mixture in mixtures:
        numbers = "  ".join(f"{value:{width}.2%}" for value in (*mixture.scores, mixture.mean))
        screen.print(f"{mixture.alpha:5g}  {numbers}{'  <' if mixture is chosen else ''}")


main = cli(wise_ft, "wise_ft", unused=UNUSED_WITH_EVALUATOR)

if __name__ == "__main__":
    main()
