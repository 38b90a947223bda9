"""Averages of the weights of several fine-tuned models (model soups, arXiv:2203.05482)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clipx.distributed.comm import Comm
from clipx.evaluator.suite import Suite
from clipx.extra.wise_ft.interpolation import evaluate
from clipx.model.spec import ModelSpec
from clipx.report.console import Progress, count_of
from clipx.weights.load import LoadedWeights

if TYPE_CHECKING:
    from clipx.extra.wise_ft.command import WiseFtSpec


@dataclass(frozen=True, slots=True)
class Member:
    """Model of a soup. The scores, and the number of samples of each, are None for a uniform soup, which needs none."""

    location: str
    chosen: bool
    score: float | None = None  # of the model alone
    mixed_score: float | None = None  # of the soup with it; None for the first
    samples: float | None = None


@dataclass(frozen=True, slots=True)
class Average:
    """Average of fine-tuned models, and the models in the order in which they were considered."""

    weights: LoadedWeights
    members: Sequence[Member] = ()


def mean_of(models: Sequence[LoadedWeights]) -> LoadedWeights:
    """Returns the mean of the weights, of BatchNorm's averages, and of the temperature and bias where all have one.

    Integers, such as BatchNorm's counts, are those of the first model.
    """
    first = models[0]
    if len(models) == 1:
        return first

    def average(name: str) -> Tensor:
        tensor = first.model[name]
        if not tensor.is_floating_point():
            return tensor
        wide = torch.promote_types(tensor.dtype, torch.float64)  # the sum of many float32 weights
        total = tensor.to(wide)
        for model in models[1:]:
            total = total + model.model[name].to(wide)
        return (total / len(models)).to(tensor.dtype)

    return replace(
        first,
        location=f"the mean of {', '.join(model.location for model in models)}",
        model={name: average(name) for name in first.model},
        log_scale=_mean([model.log_scale for model in models]),
        bias=_mean([model.bias for model in models]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if len(found) == len(values) else None


def mix(spec: WiseFtSpec, model: ModelSpec, models: Sequence[LoadedWeights], comm: Comm) -> Average:
    """Returns the soup of the options; a single model is returned unchanged. Collective."""
    if len(models) == 1:
        return Average(models[0])
    if spec.soup == "uniform":
        return Average(mean_of(models), [Member(one.location, True) for one in models])
    return _greedy(spec, model, models, comm)


def _greedy(spec: WiseFtSpec, model: ModelSpec, models: Sequence[LoadedWeights], comm: Comm) -> Average:
    """Adds models in descending order of the metric, each if the mean with it does not have a lower one.

    Of equal models the one that was named first comes first.
    """
    suite, metric = Suite.open(spec.evaluator, spec.data, None, comm), f"eval/{spec.metric}"
    progress = Progress(shown=comm.is_main)
    numbers = [evaluate(spec, model, one, suite, comm, of) for of, one in progress.numbered(models, "model")]
    samples = numbers[0].get(count_of(metric))
    alone = [found[metric] for found in numbers]
    order = sorted(range(len(models)), key=lambda i: -alone[i])
    kept, best = [models[order[0]]], alone[order[0]]
    members = [Member(kept[0].location, True, best, samples=samples)]
    for of, i in progress.numbered(order[1:], "soup"):
        mixed = evaluate(spec, model, mean_of([*kept, models[i]]), suite, comm, of)[metric]
        members.append(Member(models[i].location, mixed >= best, alone[i], mixed, samples))
        if mixed >= best:
            kept, best = [*kept, models[i]], mixed
    return Average(mean_of(kept), members)
