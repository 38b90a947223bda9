"""Names of the metrics of a run's evaluations: which evaluator gives a metric, and how often."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from clipx.config.duration import Cadence, Duration, Length
from clipx.config.suggestions import did_you_mean
from clipx.errors import ConfigError
from clipx.evaluator.spec import EvaluatorSpec

_PREFIX = "eval/"
_HEAD = f"{_PREFIX}head/"  # of an objective's head, which every evaluation scores
_HEAD_METRICS = ("top1", "chance")


def full_name(metric: str) -> str:
    """Returns a metric with the prefix eval/, which may be omitted."""
    return metric if metric.startswith(_PREFIX) else f"{_PREFIX}{metric}"


def evaluators_of(metric: str, evaluators: Mapping[str, EvaluatorSpec]) -> Sequence[str]:
    """Returns the names of the evaluators whose evaluations give a metric: one, or all for a head's metric."""
    active = [name for name, evaluator in evaluators.items() if evaluator.every != "none"]
    return active if metric.startswith(_HEAD) else [name for name in active if metric.startswith(f"{_PREFIX}{name}/")]


def check_metric(key: str, metric: str, evaluators: Mapping[str, EvaluatorSpec], head: bool) -> None:
    """Raises ConfigError if no evaluator gives a metric.

    Args:
        key: key of the option that names the metric.
        metric: name with the prefix eval/.
        evaluators: {name: evaluator} of the run.
        head: whether the objective has a head.
    """
    prefixes = [f"{_PREFIX}{name}/" for name, evaluator in evaluators.items() if evaluator.every != "none"]
    prefixes += [_HEAD] if prefixes and head else []
    prefix = next((prefix for prefix in prefixes if metric.startswith(prefix)), None)
    if prefix is None:
        known = ", ".join(f"{prefix}…" for prefix in prefixes) or "them (evaluator=[] has none)"
        raise ConfigError(f"{key}={metric} is not a metric of an evaluator of this run: give one of {known}, or null")
    name = prefix.split("/")[1]
    metrics = _HEAD_METRICS if prefix == _HEAD else evaluators[name].metrics
    rest = metric.removeprefix(prefix)
    # Further parts before the metric name a set, or a subset of the classes, which the data defines.
    if metrics and not any(f"/{rest}".endswith(f"/{known}") for known in metrics):
        names = [f"{prefix}{known}" for known in metrics]
        raise ConfigError(
            f"{key}={metric} is not a metric of evaluator.{name}: give one of {', '.join(names)}"
            f"{did_you_mean(metric, names)}, or null"
        )


def evaluations_before_end(
    metric: str, evaluators: Mapping[str, EvaluatorSpec], whole: Duration, length: Length
) -> int | None:
    """Returns the number of evaluations that give a metric before the end of the run. None: not known yet.

    `whole`: duration of the run. `length`: samples of an epoch and a step, 0 where they are not known yet.
    """
    counts = [_evaluations(evaluators[name].cadence, whole, length) for name in evaluators_of(metric, evaluators)]
    known = [count for count in counts if count is not None]
    return max(known, default=0) if len(known) == len(counts) else None


def _evaluations(cadence: Cadence, whole: Duration, length: Length) -> int | None:
    if cadence.period is None:
        return 0
    share = cadence.period.share(whole, length)
    return None if share is None else max(0, math.ceil(1 / share - 1e-9) - 1)
