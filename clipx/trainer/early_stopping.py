"""Ends a run before `duration`, by the patience of a metric or by a sweeper that prunes it.

A run that ends early evaluates, saves its last checkpoint and writes its report as at its normal end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from clipx.config.duration import Duration, Length
from clipx.config.options import option
from clipx.config.specs import complete, frozen
from clipx.distributed.comm import Comm
from clipx.errors import ConfigError, require
from clipx.evaluator.spec import EvaluatorSpec
from clipx.storage.jsonl import read_objects
from clipx.storage.safe_json import read_regular

PRUNE = "prune"
"""File in the run directory that ends the run at its next log or evaluation; its text is the reason."""

_LONGEST_REASON = 500  # characters


class Improvement(StrEnum):
    """Improvement in which a metric improves."""

    max = "max"
    min = "min"


class Ending(StrEnum):
    """Cause of the early end of a run."""

    patience = "patience"
    pruned = "pruned"


@frozen
class EarlyStoppingSpec:
    """Ends the run when a metric of its evaluations has stopped improving. Off without `metric`."""

    metric: str | None = None
    """Metric of one of the run's evaluators, such as eval/zeroshot/top1, or zeroshot/top1 for short. null: the run
    trains for its whole duration."""

    patience: int = option(3, ge=1, when="metric")
    """Number of evaluations in a row without an improvement after which the run ends."""

    min_delta: float = option(0.0, ge=0, when="metric")
    """Smallest change of the metric, in its unit, that is an improvement. A share such as top1 is between 0 and 1."""

    mode: Improvement = option(Improvement.max, when="metric")
    """Improvement of an improvement: max for accuracy and recall, min for eval/retrieval/…/median_rank."""

    def __post_init__(self) -> None:
        if self.metric:
            from clipx.evaluator.metric_names import full_name

            complete(self, metric=full_name(self.metric))

    def check(self, evaluators: Mapping[str, EvaluatorSpec], head: bool, whole: Duration, length: Length) -> None:
        """Raises ConfigError if no evaluator gives the metric, or if the run ends before its patience does.

        Args:
            evaluators: {name: evaluator} of the run.
            head: whether the objective has a head, which the run evaluates too.
            whole: duration of the run.
            length: samples of an epoch and a step; the check is skipped where it needs an unknown number.
        """
        if self.metric is None:
            return
        from clipx.evaluator.metric_names import check_metric, evaluations_before_end, evaluators_of

        check_metric("early_stopping.metric", self.metric, evaluators, head)
        most = evaluations_before_end(self.metric, evaluators, whole, length)
        every = ", ".join(
            f"evaluator.{name}.every={evaluators[name].every}" for name in evaluators_of(self.metric, evaluators)
        )
        require(
            most is None or most > self.patience,
            f"early_stopping.patience={self.patience} needs at least {self.patience + 1} evaluations before the end, "
            f"and {every} gives {most} in duration={whole.text}: evaluate more often, lower the patience, or use "
            "early_stopping.metric=null",
        )


class EarlyStopping:
    """Decision whether a run ends early, the same on all ranks. `state` is part of a checkpoint."""

    ending: Ending | None = None
    message: str = ""

    def __init__(self, spec: EarlyStoppingSpec, run_dir: Path, comm: Comm) -> None:
        self._spec, self._comm, self._marker = spec, comm, run_dir / PRUNE
        self._best: float | None = None
        self._waited = 0  # evaluations since the best one

    def ends_after(self, numbers: Mapping[str, float], logged: bool) -> bool:
        """Returns whether the run ends after this step. Collective after an evaluation and for a logged step.

        Args:
            numbers: metrics of the evaluation after this step, {} without one.
            logged: whether the step is logged; only then and after an evaluation the file system is read.
        """
        if numbers or logged:
            # Ranks could read a shared file system at different times: the values of rank 0 decide.
            main = self._comm.broadcast_object((self._value(numbers), self._reason() if self._comm.is_main else None))
            self._count(main[0])
            self._decide(main[1])
        return self.ending is not None

    def _value(self, numbers: Mapping[str, float]) -> float | None:
        """Returns the value of the metric; None if its evaluator has not run. Raises ConfigError if it has none."""
        metric = self._spec.metric
        if metric is None or metric in numbers:
            return numbers.get(metric or "")
        evaluated = [name for name in numbers if name.startswith(f"eval/{metric.split('/')[1]}/")]
        if evaluated:
            raise ConfigError(
                f"early_stopping.metric={metric} is not a metric of this data: give one of {', '.join(evaluated)}"
            )
        return None

    def _reason(self) -> str | None:
        """Returns the text of the file `prune`, None without the file."""
        try:
            text = read_regular(self._marker).decode(errors="replace")
        except OSError:
            return None
        return " ".join(text.split())[:_LONGEST_REASON] or f"the file {PRUNE} exists"

    def _count(self, value: float | None) -> None:
        if value is None:
            return
        sign = 1 if self._spec.mode is Improvement.max else -1
        better = self._best is None or sign * (value - self._best) > self._spec.min_delta
        improved = better and math.isfinite(value)
        self._best, self._waited = (value, 0) if improved else (self._best, self._waited + 1)

    def _decide(self, reason: str | None) -> None:
        if reason is not None:
            self.ending, self.message = Ending.pruned, reason
        elif self._spec.metric is not None and self._waited >= self._spec.patience:
            best = "no finite value" if self._best is None else f"no improvement on {self._best:.6g}"
            self.ending = Ending.patience
            self.message = f"{best} of {self._spec.metric} in {self._waited} evaluations"

    def announce(self, show: Callable[[str], None], event: Callable[..., None], step: int) -> None:
        """Shows and records the early end of the run, on rank 0."""
        if self.ending is not None and self._comm.is_main:
            verb = "pruned" if self.ending is Ending.pruned else "stopped early"
            show(f"{verb} after step {step:,}: {self.message}")
            event("early_stopped", step=step, ending=str(self.ending), message=self.message)

    @property
    def facts(self) -> dict[str, str]:
        """Facts for the event `end`; empty for a run that ends with its duration."""
        return {} if self.ending is None else {"ending": str(self.ending), "message": self.message}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"metric": self._spec.metric, "mode": str(self._spec.mode), "best": self._best, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint. A run that resumes with another metric starts to wait again."""
        if (state.get("metric"), state.get("mode")) == (self._spec.metric, str(self._spec.mode)):
            self._best, self._waited = state["best"], int(state["waited"])


def early_end(run_dir: Path) -> tuple[Ending | None, str]:
    """Returns the cause and the message of the early end of a finished run; (None, "") if it trained to its end."""
    events = read_objects(run_dir / "events.jsonl")
    last: dict[str, Any] = next((event for event in reversed(events) if event.get("event") == "end"), {})
    ending = last.get("ending")
    return (Ending(ending), str(last.get("message", ""))) if ending in set(Ending) else (None, "")
