"""`resume=….pt`: a new run that continues the training of a checkpoint of open_clip's trainer."""

from __future__ import annotations

from clipx.errors import CheckpointError, ConfigError, require
from clipx.optimizer.spec import AdamWSpec
from clipx.trainer.learner import Learner
from clipx.trainer.stages import Stages
from clipx.weights.open_clip_checkpoint import Training, read


def resume_from_open_clip(place: str, learner: Learner, stages: Stages, epoch_samples: int) -> tuple[int, list[str]]:
    """Loads a checkpoint of open_clip's trainer into the learner.

    `epoch_samples`: samples per epoch of this run. Returns the samples seen, in whole steps, and lines for the log.
    Raises ConfigError and CheckpointError if this run cannot continue from the checkpoint.
    """
    spec = learner.spec
    if not isinstance(spec.optimizer, AdamWSpec):
        raise ConfigError(
            f"resume={place} has AdamW's moments, which optimizer={spec.optimizer.kind} cannot use: choose "
            f"optimizer=adamw, or load the weights alone with model.weights={place}"
        )
    require(
        not spec.objective.indexed,
        f"objective={spec.objective.kind} needs per-sample state, which resume={place} does not contain: choose "
        f"objective=infonce, or load the weights alone with model.weights={place}",
    )
    found = read(place, spec.model, [name for name, _ in learner.objective.named_parameters()])
    learner.state.restore_learned(found.tensors)
    seen = stages.last_step(found.epoch * epoch_samples)
    if seen >= stages.total:
        raise CheckpointError(
            f"resume={place} is of epoch {found.epoch}, {seen:,} samples in this run, but duration={spec.duration} is "
            f"{stages.total:,}: train longer"
        )
    return seen, [_describe(place, found, seen, stages.steps(seen)), *_other_options(found, spec.optimizer)]


def _describe(place: str, found: Training, seen: int, steps: int) -> str:
    return (
        f"{place}, open_clip's trainer after {found.epoch} epochs and {found.steps:,} steps: {seen:,} samples and "
        f"{steps:,} steps in this run. It does not contain the model's configuration: that of this run is used. Random "
        "numbers, the order of samples, the loss scale and an average of the weights start anew"
    )


def _other_options(found: Training, optimizer: AdamWSpec) -> list[str]:
    own = {"betas": tuple(optimizer.betas), "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
    return [f"optimizer.{key}: {there} -> {own[key]}" for key, there in found.options.items() if there != own[key]]
