"""Counters and other small values of a run in a checkpoint, in addition to the tensors of `TrainState`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clipx.checkpoint.format import Checkpoint
from clipx.config.saved import to_dict
from clipx.data.streams import number_of_streams
from clipx.errors import ConfigError

if TYPE_CHECKING:
    from clipx.trainer.trainer import Trainer


def counters(trainer: Trainer) -> dict[str, Any]:
    """Returns the values for the file `state.json` of a checkpoint."""
    learner, teacher, streams = trainer.learner, trainer.teacher, number_of_streams(trainer.order)
    return {
        "samples_seen": trainer.samples_seen,
        "epoch_samples": trainer.order.samples,
        "non_finite": [learner.non_finite.total, learner.non_finite.consecutive],
        "loss_scale": learner.loss_scale.state(),
        "overdue": trainer.evaluation.overdue,
        "early_stopping": trainer.early_stopping.state(),
        "interval": trainer.meter.state(),
        "world": trainer.comm.world,
        "precision": learner.format.kind,
        "data": trainer.dataset.train.fingerprint,
        "config": to_dict(trainer.spec),
        **({} if streams is None else {"streams": streams}),
        **({} if teacher is None else {"teacher": teacher.digest}),
    }


def restore_counters(trainer: Trainer, found: Checkpoint) -> None:
    """Restores the values from a checkpoint. Raises CheckpointError if its step does not fit the stages of the run."""
    learner, state = trainer.learner, found.state
    trainer.samples_seen = int(state["samples_seen"])
    if found.step > trainer.steps_total:
        raise ConfigError(
            f"duration={trainer.spec.duration} ends at step {trainer.steps_total:,}, and {found.folder} is of step "
            f"{found.step:,}: give duration={found.step}st or more, or an earlier checkpoint by resume=step:N"
        )
    trainer.plan.check_resumes(trainer.samples_seen, found.step)
    learner.non_finite.total, learner.non_finite.consecutive = state["non_finite"]
    learner.loss_scale.restore(state.get("loss_scale", {}))
    trainer.evaluation.overdue = [name for name in state["overdue"] if name in trainer.spec.active_evaluators]
    trainer.early_stopping.restore(state.get("early_stopping", {}))
    trainer.meter.restore(state.get("interval", {}))
