"""`resume=….pt`: a new run goes on where open_clip's trainer was."""

from __future__ import annotations

from clipx.errors import CheckpointError, ConfigError, require
from clipx.optimizer.adamw import AdamWSpec
from clipx.trainer.learner import Learner
from clipx.trainer.stages import StagePlan
from clipx.weights.open_clip_checkpoint import Training, read


def resume_from_open_clip(place: str, learner: Learner, plan: StagePlan, epoch_samples: int) -> tuple[int, list[str]]:
    """Fills the learner with what is in a checkpoint of open_clip's trainer. Returns the samples seen by then, in
    whole steps, and what the log should say. `epoch_samples`: of an epoch here.

    Raises ConfigError and CheckpointError where this run cannot go on from it.
    """
    spec = learner.spec
    if not isinstance(spec.optimizer, AdamWSpec):
        raise ConfigError(
            f"resume={place} has AdamW's moments, and optimizer={spec.optimizer.kind} cannot go on with them: choose "
            f"optimizer=adamw, or begin with model.weights={place}"
        )
    require(
        not spec.objective.indexed,
        f"objective={spec.objective.kind} keeps state for each sample, which resume={place} has not: choose "
        f"objective=infonce, or begin with model.weights={place}",
    )
    found = read(place, spec.model, [name for name, _ in learner.objective.named_parameters()])
    learner.state.restore_learned(found.tensors)
    seen = found.epoch * epoch_samples
    stage = plan.at(seen)
    seen -= (seen - stage.start) % stage.batch_size
    if seen >= plan.total:
        raise CheckpointError(
            f"resume={place} is of epoch {found.epoch}, which is {seen:,} samples here, and duration={spec.duration} "
            f"is {plan.total:,}: train longer"
        )
    return seen, [_describe(place, found, seen, plan.steps(seen)), *_other_options(found, spec.optimizer)]


def _describe(place: str, found: Training, seen: int, steps: int) -> str:
    return (
        f"{place}, where open_clip's trainer was after {found.epoch} epochs and {found.steps:,} steps: that is "
        f"{seen:,} samples and {steps:,} steps here. It does not say the model's configuration, which is taken as it "
        "is given; random numbers, the order of samples, the loss scale and an average of the weights begin anew"
    )


def _other_options(found: Training, optimizer: AdamWSpec) -> list[str]:
    own = {"betas": tuple(optimizer.betas), "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
    return [f"optimizer.{key}: {there} -> {own[key]}" for key, there in found.options.items() if there != own[key]]
