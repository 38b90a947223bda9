"""Evaluation during training: the due evaluators and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from clipx.config.duration import Length
from clipx.data.source import BadRecord
from clipx.evaluator.base import Embedder
from clipx.evaluator.predictions import PredictionWriter
from clipx.evaluator.suite import Suite
from clipx.report.console import Progress
from clipx.trainer.data_side import DataSide
from clipx.trainer.early_stopping import EarlyStopping
from clipx.trainer.learner import Learner
from clipx.trainer.spec import RunSpec

_IMAGES = 256  # images embedded at a time, for an objective with a head


class PeriodicEvaluation:
    """Evaluates at the cadence of each evaluator.

    `overdue` names the evaluators that are due and have not run; a checkpoint stores it. `early_stopping` decides by
    their metrics whether the run ends.
    """

    overdue: list[str]

    def __init__(self, spec: RunSpec, data: DataSide, length: Length) -> None:
        """Opens the sets of the evaluators. Collective. Raises ConfigError and DataError."""
        self.spec, self.data, self.comm = spec, data, data.comm
        self.suite = Suite.open(spec.active_evaluators, spec.data, data.opened, data.comm)
        self.early_stopping = EarlyStopping(spec.early_stopping, Path(spec.run_dir), data.comm)
        self.overdue = []
        self._cadences = {
            name: evaluator.cadence.on(length, f"evaluator.{name}.every")
            for name, evaluator in spec.active_evaluators.items()
        }

    def add_due(self, before: int, after: int) -> None:
        """Adds the evaluators that are due between two numbers of samples seen."""
        self.overdue += [name for name, cadence in self._cadences.items() if cadence.due(before, after)]

    def add_at_end(self, numbers: Mapping[str, float]) -> None:
        """Replaces `overdue` by the evaluators that are due at the end of the run and have no metrics in `numbers`,
        those of the last step."""
        ran = {name.split("/")[1] for name in numbers}
        self.overdue = [name for name, cadence in self._cadences.items() if cadence.at_end and name not in ran]

    def run(
        self,
        learner: Learner,
        quarantine: Callable[[Sequence[BadRecord]], None],
        heartbeat: Callable[[], None],
        progress: Progress,
    ) -> dict[str, float]:
        """Runs the overdue evaluators, with the average of the weights if there is one. Returns metrics by name.
        Collective."""
        names, self.overdue = self.overdue, []
        model = learner.model if learner.average is None else learner.average.model
        spec = self.spec
        embedder = Embedder.build(
            model, spec.model, spec.data, self.comm, learner.precision, quarantine, heartbeat, self.data.pool, progress
        )
        embedder.compared = PredictionWriter(Path(spec.run_dir), spec.seed, spec.report and self.comm.is_main)
        numbers = self.suite.evaluate(names, embedder)
        held_out = self.data.opened.held_out
        if spec.objective.has_head and held_out is not None:
            images = embedder.images(held_out, _IMAGES)
            scores = learner.objective.score(images.image, images.labels)
            numbers |= {f"eval/head/{name}": score for name, score in scores.items()}
        return numbers
