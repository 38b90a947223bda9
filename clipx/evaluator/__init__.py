"""Evaluators: a model and held-out data in, named numbers out, on all ranks, at their own cadence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clipx.config import MISSING
from clipx.data import Dataset
from clipx.errors import require
from clipx.schedule import check_cadence

if TYPE_CHECKING:
    from clipx.evaluator.base import Embedder, Metrics


@dataclass(kw_only=True, slots=True)
class EvaluatorSpec:
    kind: str = MISSING
    every: str = "1ep"  # a duration (1ep, 500st, 1e6sa; happens at the end too), end, or none
    batch_size: int = 256  # images or captions embedded at a time

    def __post_init__(self) -> None:
        check_cadence(self.every, f"evaluator.{self.kind}.every")
        require(self.batch_size >= 1, f"evaluator.{self.kind}.batch_size={self.batch_size} must be at least 1")

    def check(self, data: Dataset) -> None:
        """Raises where the held-out data lacks what this evaluator needs: called before training starts."""

    def evaluate(self, embedder: Embedder, data: Dataset) -> Metrics:
        """Runs on all ranks; every rank returns the same numbers, whatever the number of ranks."""
        raise NotImplementedError
