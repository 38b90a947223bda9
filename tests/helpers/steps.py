"""Steps of a learner without a trainer."""

from __future__ import annotations

from clipx.data.batch import Batch
from clipx.objective.base import Metrics
from clipx.trainer.learner import Learner
from clipx.trainer.stages import Step


def take_step(learner: Learner, batch: Batch, number: int, detailed: bool = False) -> Metrics:
    """Takes a step as the trainer does: at the peak learning rate, of batches as large as data.batch_size."""
    spec, size = learner.spec, learner.spec.data.batch_size
    dropout, lr = spec.model.patch_dropout, spec.optimizer.lr
    step = Step(number, number * size, (number + 1) * size, size, spec.model.image.size, dropout, lr)
    metrics = learner.backward(batch, step, detailed)
    learner.settle()
    return metrics | learner.update(step, detailed)
