"""Evaluators: a model and held-out data in, named numbers out, on all ranks, at their own cadence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from clipx.config.duration import check_cadence
from clipx.config.registry import MISSING
from clipx.data.spec import Dataset, DataSpec, non_default_values
from clipx.errors import ConfigError, require

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedder, Metrics

# Keys of DataSpec that say how samples are drawn and changed for training.
_OF_TRAINING = (
    *("batch_size", "micro_batches", "shuffle_window", "crop_scale", "replacement", "weight"),
    *("min_caption_chars", "min_side"),
)


def check_set(key: str, data: DataSpec, learns: bool) -> None:
    """Raises ConfigError for an option of training. `learns`: whether a part of the set is learned from."""
    for option, value in non_default_values(data, _OF_TRAINING if learns else (*_OF_TRAINING, "held_out_share")):
        raise ConfigError(f"{key}.{option}={value} has no effect on a set, which is evaluated whole: leave it out")


@dataclass(kw_only=True, slots=True)
class EvaluatorSpec:
    learns: ClassVar[bool] = False  # whether it learns from the training samples of the data it evaluates
    parts: ClassVar[tuple[str, ...]] = ()  # that the names of its numbers begin with
    compared: ClassVar[
        tuple[str, ...]
    ] = ()  # numbers by which sets are compared, the more the better; most telling first

    kind: str = MISSING
    every: str = "1ep"  # a duration (1ep, 500st, 1e6sa; happens at the end too), end, or none
    batch_size: int = 256  # images or captions embedded at a time
    held_out: bool = True  # whether the held-out samples of the run's data are evaluated
    sets: dict[str, DataSpec] = field(
        default_factory=dict
    )  # others: +data@evaluator.EVALUATOR.sets.NAME=OPTION adds one

    def __post_init__(self) -> None:
        key = f"evaluator.{self.kind}"
        check_cadence(self.every, f"{key}.every")
        require(self.batch_size >= 1, f"{key}.batch_size={self.batch_size} must be at least 1")
        require(
            self.held_out or bool(self.sets),
            f"{key}.held_out=false leaves nothing to evaluate: add a set by +data@{key}.sets.NAME=OPTION",
        )
        for name, data in self.sets.items():
            require(
                re.fullmatch(r"\w[\w.-]*", name) is not None,
                f"{key}.sets.{name} is part of a metric's name: write it with letters, digits, - and _",
            )
            check_set(f"{key}.sets.{name}", data, self.learns)

    def check(self, data: Dataset) -> None:
        """Raises where the held-out data lacks what this evaluator needs: called before training starts."""

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """Runs on all ranks; every rank returns the same numbers, whatever the number of ranks."""
        raise NotImplementedError
